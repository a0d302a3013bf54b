"""Pure data and arithmetic: no hardware, no library, no input or output."""

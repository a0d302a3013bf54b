"""The files of the folder `profiles`: found, read, and matched with machines."""

"""Files of the field, read into the model."""

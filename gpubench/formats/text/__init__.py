"""The table for people: one view for each subject, printed on a page."""

"""What the table for people shows: a view a subject, on a page."""

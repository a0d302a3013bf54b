"""Times of operations as samples: how many to take, their spread and noise, and who was late."""

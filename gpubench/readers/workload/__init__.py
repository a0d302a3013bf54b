"""Files that describe a training job: models, and what communication and computation cost each other."""

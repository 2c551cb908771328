"""The files that people write: the study's, a stage's, read strictly and told in words where they are wrong."""

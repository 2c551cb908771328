"""Settings: the files that people write, read strictly; messages name file, key, rule and value."""

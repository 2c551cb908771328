"""Settings: files that users write, read strictly; messages name file, key, rule and value."""

"""The lean loop that trains proxies, and the step that it shares with full runs."""

"""A trainer that is a program: what it is given, what it writes, and its process."""

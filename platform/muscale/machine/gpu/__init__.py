"""Checks that need a GPU: short full runs, compared with the CPU and with the estimates."""

"""What only a GPU can show: short full runs on it, held against the CPU and against the estimates."""

"""The best sizes without a law: Chinchilla's approaches 1 and 2 (Hoffmann et al. 2203.15556, sec. 3.1 and 3.2)."""

"""`hawk doctor`: what this machine has, against what a configuration needs."""

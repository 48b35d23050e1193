"""The `hawk` command: bring a deployment up, watch it, and show that it is right."""

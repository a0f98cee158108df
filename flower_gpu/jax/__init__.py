"""What is for JAX. Nothing here imports it before a function is called."""

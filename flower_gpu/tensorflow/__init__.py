"""What needs TensorFlow, as far as it is installed. The modules here are imported in workers only."""

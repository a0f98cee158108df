"""What is for Keras models, with any of its backends. Imports none of them."""

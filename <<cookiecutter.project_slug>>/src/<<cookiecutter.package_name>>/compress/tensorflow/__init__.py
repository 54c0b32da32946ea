"""What compression does in TensorFlow (Keras 3)."""

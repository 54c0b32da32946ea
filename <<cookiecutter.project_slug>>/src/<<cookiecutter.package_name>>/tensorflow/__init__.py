"""The TensorFlow wing, with Keras 3."""

import os

# Read when TensorFlow is imported: no notes about its build, and no other backend for Keras.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["KERAS_BACKEND"] = "tensorflow"

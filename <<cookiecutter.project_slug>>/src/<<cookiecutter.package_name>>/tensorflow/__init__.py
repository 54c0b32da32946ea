"""The TensorFlow wing, with Keras 3."""

import os
import sys

# Read when TensorFlow is imported: no notes about its build, and no other backend for Keras.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
os.environ["KERAS_BACKEND"] = "tensorflow"

# Keras would import scikit-learn for wrappers that are not used here, which takes a third of a rank's start.
if "sklearn" not in sys.modules:
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    import keras  # noqa: F401

    del sys.modules["sklearn"]

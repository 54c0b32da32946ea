"""A data-parallel training project on Horovod."""

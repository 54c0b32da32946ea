"""tmp"""


def run_elastic(*a):
    raise NotImplementedError


class Limits:
    pass

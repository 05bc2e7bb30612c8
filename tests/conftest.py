"""Settings shared by all tests."""

from hypothesis import settings

# same examples on every machine; no deadline, because a busy machine is not a failure
settings.register_profile("musalib", deadline=None, derandomize=True)
settings.load_profile("musalib")

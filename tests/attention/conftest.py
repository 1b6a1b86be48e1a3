"""Settings for all tests of attention."""

from onethread import one_thread as one_thread

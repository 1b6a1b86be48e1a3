"""Settings for all tests of sampling."""

from onethread import one_thread as one_thread

"""What all tests start from."""

import signal

# A shell's background job inherits an ignored SIGINT, and so would all that the tests start; they interrupt processes
# as a terminal would.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""What the host agents of a run tell each other, and what follows from it. No sockets, threads or clocks in here."""

"""One conversation's state, and the pure decisions about reusing it."""

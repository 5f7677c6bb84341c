"""Caches: what a layer remembers of the tokens fed so far."""

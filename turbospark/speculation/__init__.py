"""Drafters, and the rules by which what they propose stays.

A drafter proposes tokens, the target looks at all of them in one pass, and `accept` decides how
many stay. `adaptive` decides how many are worth proposing.
"""

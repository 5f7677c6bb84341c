"""What came of drafting in one generation."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class DraftStatistics:
    """Counts of one generation so far.

    Attributes:
        rounds: passes over proposals.
        drafted: proposals.
        accepted: proposals that stayed.
        accepted_per_position: the same by place in the draft, as long as the longest draft.
        rollbacks: rounds of which something was taken back.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    rollbacks: int = 0

    def after_draft(self, count: int) -> "DraftStatistics":
        """With one more round, of `count` proposals."""
        places = self.accepted_per_position
        return replace(
            self,
            rounds=self.rounds + 1,
            drafted=self.drafted + count,
            accepted_per_position=places + (0,) * (count - len(places)),
        )

    def after_accept(self, place: int) -> "DraftStatistics":
        """With the proposal at `place` kept."""
        places = self.accepted_per_position
        kept = (*places[:place], places[place] + 1, *places[place + 1 :])
        return replace(self, accepted=self.accepted + 1, accepted_per_position=kept)

    def after_rollback(self) -> "DraftStatistics":
        """With one more round of which something was taken back."""
        return replace(self, rollbacks=self.rollbacks + 1)

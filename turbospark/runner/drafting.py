"""Whether and how much a generation drafts."""

from dataclasses import replace

from turbospark.errors import OptionError
from turbospark.runner.refusals import refusal
from turbospark.runner.runner import Runner
from turbospark.runner.speculative import Drafting
from turbospark.sampling.select import Chooser
from turbospark.speculation.adaptive import AdaptiveBlock, BlockPolicy, FixedBlock

MOST_STEPS = 4  # proposals of an adaptive round, where each is a step of its own
MOST_AT_ONCE = 8  # the same where one pass proposes them all


def choose_policy(runner: Runner, block: int | None) -> BlockPolicy | None:
    """Who decides how many tokens a round of this runner proposes.

    Args:
        runner: asked what it can take; keeps the policy that adapts from call to call.
        block: a fixed number, or None for one that adapts.

    Returns:
        None where nothing can be drafted and nothing was asked for.

    Raises:
        OptionError: `block` is more than a round can take, or nothing can be drafted.
    """
    most = runner.drafter.max_block
    if block is not None:
        _check_block(runner, block, most)
        return FixedBlock(block)
    if runner.block_policy is None and most:
        usual = MOST_AT_ONCE if runner.drafter.block_passes else MOST_STEPS
        runner.block_policy = AdaptiveBlock(min(most, usual))
    return runner.block_policy


def _check_block(runner: Runner, block: int, most: int) -> None:
    # What keeps a single conversation from being drafted for shows when its prompt is fed.
    lasting = runner.traits if most == 0 else replace(runner.traits, draft_off="")
    reason = refusal("draft", lasting)
    if reason is not None:
        way = "leave draft_block out"
        if most == 0:
            way = f"load with a drafter, such as draft='ngram', or {way}"
        raise OptionError(f"draft_block={block}: {reason}; {way}")
    if block > most:
        raise OptionError(
            f"draft_block={block}: a round of the {runner.drafter.name} drafter takes at most "
            f"{most} proposals"
        )


def open_drafting(
    runner: Runner, chooser: Chooser, policy: BlockPolicy | None
) -> tuple[Drafting | None, str | None]:
    """The drafting of a generation whose prompt has been fed, or why there is none.

    Args:
        runner: whose session the prompt is in.
        chooser: the generation's.
        policy: None where none was wanted.
    """
    reason = runner.draft_off_reason()
    if reason is None and policy is None:
        reason = "drafting was left out of this call"
    if reason is not None or policy is None:
        return None, reason
    session, vocab_size = runner.session, runner.model.vocab_size
    made = Drafting(runner, chooser, policy, max_context=session.max_context, vocab_size=vocab_size)
    return made, None

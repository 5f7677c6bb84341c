"""Muse Glimmer, text: `muse_glimmer_text`, and the text part of `muse_glimmer`."""

from families.muse_glimmer.assistant import build_assistant
from families.muse_glimmer.model import build
from turbospark.protocols import Family

FAMILY = Family(name="muse_glimmer", build=build, drafters={"dflash": build_assistant})

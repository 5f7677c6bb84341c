"""Turns Metal text into C++ that clang compiles: threadgroup variables become runtime calls."""

import functools
import re

SOURCE_NAME = "kernel.metal"  # the file that diagnostics and line tables name

DIRECTIVES = re.compile(r"(?:^[ \t]*#[^\n]*\n\s*)+\Z", re.MULTILINE)


@functools.cache
def lower(source: str) -> str:
    """C++ text of a Metal source; line numbers stay those of the source."""
    # clang takes no attributes on an explicit instantiation.
    source = re.sub(r"template \[\[host_name\([^)]*\)\]\] \[\[kernel\]\] ", "template ", source)
    # Unrolled bodies take three times as long to compile, and nothing here is faster for it.
    source = re.sub(r'_Pragma\("clang loop unroll\(full\)"\)', "", source)
    return f'#line 1 "{SOURCE_NAME}"\n{lower_threadgroup_variables(source)}'


def lower_threadgroup_variables(source: str) -> str:
    """Bind each declared threadgroup variable to memory of the runtime.

    Pointers, references and parameters keep the `threadgroup` qualifier, which the shim defines.
    """
    aliases = re.findall(r"^#define (\w+) threadgroup\b", source, re.MULTILINE)
    source = _blank_comments(source)
    pieces: list[str] = []
    position = count = 0
    for match in re.finditer(rf"\b({'|'.join(['threadgroup', *aliases])})\b", source):
        end = _declaration_end(source, match.end())
        before = DIRECTIVES.sub("", source[: match.start()]).rstrip()
        starts_statement = before[-1:] in {";", "{", "}", ")", ""}
        if match.start() < position or end is None or not starts_statement:
            continue
        declarators = _split_at_commas(source[match.end() : end].strip())
        named = [_name_of(declarator) for declarator in declarators]
        types = ", ".join(
            declarator[: declarator.rindex(name)] + f"EMU_THREADGROUP_NAME({name}) " + dimensions
            for declarator, (name, dimensions) in zip(declarators, named, strict=True)
        )
        binds = " ".join(
            f"EMU_THREADGROUP_BIND({count + i}, {name});" for i, (name, _) in enumerate(named)
        )
        pieces += [source[position : match.start()], f"EMU_THREADGROUP_TYPE({types}); {binds}"]
        position = end + 1
        count += len(named)
    return "".join([*pieces, source[position:]])


def _blank_comments(source: str) -> str:
    return re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), source, flags=re.DOTALL
    )


def _declaration_end(source: str, start: int) -> int | None:
    """Where the `;` of a variable declaration is; None for a pointer, reference or parameter."""
    depth = 0
    for at in range(start, len(source)):
        character = source[at]
        if character in "[(<":
            depth += 1
        elif character in "])>":
            depth -= 1
            if depth < 0:
                return None
        elif depth == 0 and character in "*&=:{":
            return None
        elif depth == 0 and character == ";":
            return at
    return None


def _split_at_commas(text: str) -> list[str]:
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _name_of(declarator: str) -> tuple[str, str]:
    """The name of a declarator and its array dimensions."""
    match = re.search(r"(\w+)\s*((?:\[[^\]]*\]\s*)*)$", declarator.strip())
    if match is None:
        raise ValueError(f"no name in the declaration {declarator!r}")
    return match[1], match[2]

"""Changes to the keys of a YAML's sections that leave every other byte of the file as it was.

A parser says where a value stands; the text is cut and pasted there. Nothing is written anew, so
comments, quotes, number formats, line ends and the order of the keys stay.
"""

import yaml

Splice = tuple[int, int, str]  # text[start:end] becomes that


def edit(text: str, changes: dict[str, dict]) -> str:
    """Return the YAML ``text`` with ``changes`` to its sections, whose content then equals::

        {**content, section: {**content[section], key: value}}

    Args:
        changes: ``{section: {key: value}}``; value None removes the key with its line. A key that
            is not there comes after the one before it in ``changes``; one that is there with that
            value already is left as it is written.

    Raises:
        ValueError: no such section; one written so that it cannot be changed alone (anchors,
            merges, ...).
    """
    content = yaml.safe_load(text)
    sections = {key.value: node for key, node in yaml.compose(text, yaml.SafeLoader).value}
    splices, wanted = [], dict(content)
    for section, values in changes.items():
        node = sections.get(section)
        if not isinstance(node, yaml.MappingNode) or not node.value:
            raise ValueError(f"{section}: expected a section of keys and values")
        splices += _splices(text, node, values)
        merged = {**content[section], **values}
        wanted[section] = {key: value for key, value in merged.items() if value is not None}
    edited = _apply(text, splices)
    if _content(edited) != wanted:
        raise ValueError(
            f"{', '.join(changes)}: written with anchors, merges or otherwise so that it cannot be "
            "changed alone; write it as plain 'key: value' lines"
        )
    return edited


def repeated_keys(text: str) -> list[str]:
    """Return what says of each key that comes twice, with the same value, where that is.

    Raises:
        ValueError: a key that comes twice with different values.
    """
    found = []
    for node in _mappings(yaml.compose(text, yaml.SafeLoader)):
        seen: dict = {}
        for key, value in node.value:
            first_key, first_value = seen.setdefault(str(key.value), (key, value))
            if first_key is key:
                continue
            lines = f"lines {first_key.start_mark.line + 1} and {key.start_mark.line + 1}"
            if _value(first_value) != _value(value):
                raise ValueError(f"{key.value}: comes twice with different values, {lines}")
            found.append(f"{key.value}, {lines}")
    return found


def _mappings(node):
    if isinstance(node, yaml.MappingNode):
        yield node
        for _, value in node.value:
            yield from _mappings(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            yield from _mappings(value)


def _value(node):
    return yaml.SafeLoader("").construct_document(node)


def _content(text: str):
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def _splices(text: str, node: yaml.MappingNode, values: dict) -> list[Splice]:
    keys = [key.value for key, _ in node.value]
    kept = [i for i, key in enumerate(keys) if values.get(key, ...) is not None]
    splices, last = [], min(kept, default=0)
    for key, value in values.items():
        places = [i for i, other in enumerate(keys) if other == key]
        if value is None:
            splices += [_removal(text, node, i, kept) for i in places]
        elif places:
            splices += [s for i in places for s in _replacement(text, node.value[i][1], value)]
            last = places[-1]
        else:
            splices.append(_insertion(text, node, last, f"{key}: {_scalar(value)}"))
    return splices


def _removal(text: str, node: yaml.MappingNode, i: int, kept: list[int]) -> Splice:
    key, value = node.value[i]
    if not node.flow_style:
        end = _line_end(text, _end(text, value))
        return key.start_mark.index - key.start_mark.column, end + len(_newline(text, end)), ""
    if min(kept, default=i) < i:  # with the comma before it
        return _end(text, node.value[i - 1][1]), _end(text, value), ""
    following = node.value[i + 1][0] if i + 1 < len(node.value) else None
    end = following.start_mark.index if following else _end(text, value)
    return key.start_mark.index, end, ""


def _replacement(text: str, node: yaml.Node, value) -> list[Splice]:
    if _value(node) == value:
        return []
    style = node.style if isinstance(node, yaml.ScalarNode) else None
    quote = style if style in ("'", '"') and isinstance(value, str) else ""
    return [(node.start_mark.index, _end(text, node), f"{quote}{_scalar(value)}{quote}")]


def _insertion(text: str, node: yaml.MappingNode, i: int, item: str) -> Splice:
    key, value = node.value[i]
    end = _end(text, value)
    if node.flow_style:
        return end, end, f", {item}"
    end = _line_end(text, end)
    newline = _newline(text, end) or ("\r\n" if "\r\n" in text else "\n")
    return end, end, newline + " " * key.start_mark.column + item


def _apply(text: str, splices: list[Splice]) -> str:
    parts, done = [], 0
    for start, end, new in sorted(splices, key=lambda splice: splice[0]):
        parts += [text[done:start], new]
        done = max(done, end)
    return "".join([*parts, text[done:]])


def _end(text: str, node: yaml.Node) -> int:
    """Return where the node's own text ends; a block's mark is where the next thing begins."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return len(text[: node.end_mark.index].rstrip())


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    if end < 0:
        return len(text)
    return end - 1 if text[end - 1] == "\r" else end


def _newline(text: str, end: int) -> str:
    return "\r\n" if text.startswith("\r\n", end) else text[end : end + 1]


def _scalar(value) -> str:
    return str(value) if isinstance(value, bool) else yaml.safe_dump(value).split("\n")[0]

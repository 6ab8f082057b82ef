"""Which samples share a sequence: best fit, longest first. Pure."""

from collections.abc import Sequence


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put samples into as few sequences as best-fit-decreasing finds; each sample is in exactly one.

    Args:
        lengths: of the samples, each from 1 to `capacity`.
        capacity: of a sequence.

    Returns:
        Indices of the samples of each sequence; sequences by their first sample, so that the result follows the order of the data.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    # Bit r says that there is a sequence with room r, so that the tightest fit is one shift away.
    rooms = 0
    for index in sorted(range(len(lengths)), key=lambda each: (-lengths[each], each)):
        length = lengths[index]
        assert 0 < length <= capacity, f"sample {index} has {length} tokens, room is {capacity}"
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, number = capacity, len(packs)
            packs.append([])
        packs[number].append(index)
        left = room - length
        by_room.setdefault(left, []).append(number)
        if left:
            rooms |= 1 << left
    return sorted(sorted(each) for each in packs)

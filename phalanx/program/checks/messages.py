"""Rules about messages between ranks: on every channel the same messages in the same order at both ends.

A channel is an ordered pair of ranks and a direction, forward or backward; messages on it carry no names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from phalanx.program.checks.scope import Broken
from phalanx.program.instructions import RECEIVES, SENDS, Instruction, Op, Program

Channel = tuple[Op, int, int]  # RECV_F or RECV_B, sender, receiver
Placed = tuple[int, Instruction]  # position in its program


def check_messages(programs: Sequence[Program]) -> None:
    sent: defaultdict[Channel, list[Placed]] = defaultdict(list)
    received: defaultdict[Channel, list[Placed]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for position, instruction in enumerate(program):
            if instruction.op in SENDS:
                arrival = arrival_of(instruction, rank)
                assert instruction.peer is not None
                sent[arrival.op, rank, instruction.peer].append((position, instruction))
            elif instruction.op in RECEIVES:
                assert instruction.peer is not None
                received[instruction.op, instruction.peer, rank].append((position, instruction))
    for channel in sorted(sent.keys() | received.keys()):
        _check_channel(channel, sent[channel], received[channel])


def arrival_of(send: Instruction, sender: int) -> Instruction:
    """The receive that takes what `send` sends."""
    assert send.stage is not None
    op, step = (Op.RECV_F, 1) if send.op is Op.SEND_F else (Op.RECV_B, -1)
    return Instruction(op, send.stage + step, send.micro_batch, peer=sender, half=send.half, slice=send.slice)


def _check_channel(channel: Channel, sent: list[Placed], received: list[Placed]) -> None:
    _, sender, receiver = channel
    arrivals = {arrival_of(send, sender) for _, send in sent}
    for position, receive in received:
        if receive not in arrivals:
            words = f"rank {receiver} waits for {receive}, which rank {sender} never sends"
            raise Broken(words, receiver, position)
    # Every rank has been found to send and post nothing twice, and to post all it needs.
    assert len(sent) == len(received)
    for (_, send), (position, receive) in zip(sent, received):
        if arrival_of(send, sender) != receive:
            words = f"rank {receiver} posts {receive} where rank {sender} sends {send}"
            raise Broken(f"{words}: the order must be the same at both ends", receiver, position)

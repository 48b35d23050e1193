"""The `hawk plan` command: its options, and which room does what."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hawk_connector.errors import HawkError

from .output import console, refuse
from .plan_options import Blocks, Dtype, LinkModel, Pool

if TYPE_CHECKING:
    from .plan_count import PlanRequest

__all__ = ["plan"]

_LINK = LinkModel()
_DEVICE = "blackhole-p150"


def plan(
    model: Annotated[
        str,
        typer.Option(help="llama-3.1-70b, llama-3.1-8b, qwen3-8b, smollm2-135m, or the path of a config.json."),
    ],
    tp: Annotated[int, typer.Option(min=1, max=1024, help="Tensor parallel size of the prefill side.")] = 1,
    chips: Annotated[int, typer.Option(min=1, max=1024, help="Chips of the decode side.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of the prompt.")] = 1024,
    dtype: Annotated[
        Dtype | None, typer.Option(help="KV dtype of the decode side. Default: the layout's, bfp8 for TTNN's.")
    ] = None,
    pool: Annotated[Pool, typer.Option(help="Kind of the decode side's pools.")] = Pool.cross_layer,
    blocks: Annotated[
        Blocks, typer.Option(help="Ids of the decode side's blocks: no two neighbours, falling by one, rising by one.")
    ] = Blocks.scattered,
    block_size: Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a block of the decode side.")] = 64,
    device: Annotated[
        list[str] | None,
        typer.Option(
            help="Chips of the decode side, a name of `hawk layouts`. Once more for each other decode side that is "
            f"paired with the prefill side; the first is planned. Default: {_DEVICE}."
        ),
    ] = None,
    layout: Annotated[str, typer.Option(help="How the decode side stores KV, a name of `hawk layouts`.")] = (
        "ttnn-interleaved"
    ),
    parcel_tokens: Annotated[int, typer.Option(min=1, help="parcel_tokens of the prefill side.")] = 512,
    parcel_bytes: Annotated[int, typer.Option(min=1, help="parcel_bytes of the prefill side.")] = 32 << 20,
    send_buffer_bytes: Annotated[int, typer.Option(min=1, help="send_buffer_bytes of a prefill rank.")] = 1 << 30,
    link_gbps: Annotated[float, typer.Option(min=0.001, help="The link, in 10^9 bits a second.")] = _LINK.gbps,
    read_us: Annotated[float, typer.Option(min=0, help="What a read costs besides its bytes, in µs.")] = _LINK.read_us,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw where the tiles of one block lie over the banks (.png, .svg).")
    ] = None,
) -> None:
    """Count what moving one prompt's KV takes: streams, segments, bytes, and the time on a link.

    Exit code: 0; 2 where something named is unknown, or where the two sides cannot be paired.
    """
    from . import plan_count
    from .catalog_pool import device_entry, layout_entry
    from .named_models import model_kv

    try:
        entry = layout_entry(layout)
        request = plan_count.PlanRequest(
            model=model_kv(model),
            ranks=tp,
            chips=chips,
            tokens=tokens,
            dtype=dtype or Dtype.of_codec(entry.codec),
            pool=pool.value,
            blocks=blocks,
            entry=entry,
            devices=tuple(device_entry(name) for name in device or [_DEVICE]),
            block_size=block_size,
            parcel_tokens=parcel_tokens,
            parcel_bytes=parcel_bytes,
            send_buffer_bytes=send_buffer_bytes,
            link=LinkModel(link_gbps, read_us),
        )
        report = plan_count.plan_report(request)
        if picture is not None:
            _draw(request, picture)
    except HawkError as error:
        refuse(error)
    if as_json:
        import msgspec

        typer.echo(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    from .plan_text import plan_text

    plan_text(report, console())


def _draw(request: PlanRequest, file: Path) -> None:
    from .plan_picture import draw_block

    device = request.devices[0]
    block = int(request.block_ids[0])
    chips = "1 chip" if request.chips == 1 else f"each of {request.chips} chips"
    memory = f"{device.name}, {chips}" if request.entry.needs_device else chips
    title = f"Where block {block} of {request.model.name} lies: {request.entry.name}, {memory}"
    draw_block(request.layout(device), block, title, file)

"""Pictures of rectangles and texts, written as SVG or PNG: what the drawing scripts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

LABEL, SMALL = 12, 11                                           # font sizes
INK, GREY = (30, 30, 30), (120, 120, 120)

Colour = tuple[int, int, int]


@dataclass(frozen=True)
class Rect:
    """A filled rectangle."""

    x: float
    y: float
    width: float
    height: float
    fill: Colour


@dataclass(frozen=True)
class Text:
    """Text in the middle of its line; `anchor` says what of it is at x: start, middle or end."""

    x: float
    y: float
    text: str
    size: int
    anchor: str = "start"
    fill: Colour = INK


@dataclass(frozen=True)
class Picture:
    """Shapes in pixels, later ones on top."""

    width: int
    height: int
    shapes: tuple[Rect | Text, ...]


def readable(fill: Colour) -> Colour:
    """White or black, whichever stands out more from a colour: by 4.5 or more, in the relative luminance of WCAG 2."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    return (0, 0, 0) if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else (255, 255, 255)


def text_width(text: Text) -> int:
    """Pixels, about: a digit of a sans-serif font is 0.56 of its size wide."""
    return round(0.58 * text.size * len(text.text))


def svg(what: Picture) -> str:
    """The picture as an SVG document."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{what.width}" height="{what.height}" '
        f'viewBox="0 0 {what.width} {what.height}" font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{what.width}" height="{what.height}" fill="#ffffff"/>',
    ]
    for shape in what.shapes:
        fill = "#{:02x}{:02x}{:02x}".format(*shape.fill)
        if isinstance(shape, Rect):
            size = f'width="{shape.width:.2f}" height="{shape.height:.2f}"'
            lines.append(f'<rect x="{shape.x:.2f}" y="{shape.y:.2f}" {size} fill="{fill}"/>')
        else:
            place = f'x="{shape.x:.2f}" y="{shape.y:.2f}" font-size="{shape.size}" text-anchor="{shape.anchor}"'
            lines.append(f'<text {place} dominant-baseline="central" fill="{fill}">{escape(shape.text)}</text>')
    return "\n".join((*lines, "</svg>", ""))


def write_png(what: Picture, file: Path) -> None:
    """The picture as a PNG file. Raises ValueError where the library for it is missing."""
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ModuleNotFoundError as missing:
        raise ValueError(f"--out {file}: a .png needs Pillow (pip install pillow); .svg and .txt do not") from missing
    image = Image.new("RGB", (what.width, what.height), "white")
    draw = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size) for size in {s.size for s in what.shapes if isinstance(s, Text)}}
    for shape in what.shapes:
        if isinstance(shape, Rect):
            right, low = shape.x + max(shape.width, 1) - 1, shape.y + shape.height - 1
            draw.rectangle((round(shape.x), round(shape.y), round(right), round(low)), fill=shape.fill)
        else:
            anchor = {"start": "lm", "middle": "mm", "end": "rm"}[shape.anchor]
            draw.text((shape.x, shape.y), shape.text, fill=shape.fill, font=fonts[shape.size], anchor=anchor)
    image.save(file)

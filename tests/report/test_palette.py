"""The palette reads in both themes, for eyes of three kinds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from meshwright.causes import JOB, STEP
from meshwright.graph import KINDS, QUEUES
from meshwright.report import palette

THEMES = sorted(palette.THEMES)
#: Dichromats' view in linear RGB (Viénot, Brettel and Mollon 1999, as matrices on linear sRGB).
VISION = {
    "trichromat": np.eye(3),
    "protanope": np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]]),
    "deuteranope": np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]]),
}


def test_contrast_of_black_on_white_is_21_as_wcag_says():
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21.0)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("text", ["ink", "muted", "accent", "good", "bad", "warn"])
@pytest.mark.parametrize("ground", ["page", "surface", "lane", "raised"])
def test_text_has_4_5_to_1_on_every_ground(theme, text, ground):
    colours = palette.THEMES[theme]
    assert palette.contrast(colours[text], colours[ground]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("button", ["accent", "good", "bad"])
def test_text_on_filled_buttons_and_badges_has_4_5_to_1(theme, button):
    colours = palette.THEMES[theme]
    assert palette.contrast(colours["surface"], colours[button]) >= 4.5


@pytest.mark.parametrize("theme", THEMES)
def test_marks_have_3_to_1_on_surface_and_lane_and_their_labels_4_5_to_1(theme):
    for name, colour in palette.MARKS[theme].items():
        for ground in ("surface", "lane"):
            assert palette.contrast(colour, palette.THEMES[theme][ground]) >= 3.0, (name, ground)
        assert palette.contrast(colour, palette.ink_on(colour)) >= 4.5, name


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("eye", VISION)
def test_neighbours_in_a_stack_and_the_passes_of_a_schedule_differ_for_every_eye(theme, eye):
    marks = palette.MARKS[theme]
    passes = [palette.KINDS[kind] for kind in ("F", "B", "W")]
    for a, b in [*pairwise(palette.STACK), *pairwise(passes), (passes[0], passes[2])]:
        assert _distance(marks[a], marks[b], eye) >= 30.0, (a, b)


def test_every_colour_that_is_named_exists_and_every_cause_has_one():
    colours = {cause.colour for cause in (*STEP, *JOB)}
    named = {*colours, *palette.KINDS.values(), *palette.QUEUES.values(), *palette.STACK}
    assert named <= set(palette.MARKS["light"]) == set(palette.MARKS["dark"])
    assert all(palette.cause_colour(cause.name) == cause.colour for cause in STEP)
    assert set(palette.KINDS) <= set(KINDS) and set(palette.QUEUES) <= set(QUEUES)


def _distance(a: str, b: str, eye: str) -> float:
    """CIE 1976 colour difference as the eye sees it; about 2.3 is just noticeable."""
    return float(np.linalg.norm(_lab(a, eye) - _lab(b, eye)))


def _lab(colour: str, eye: str) -> np.ndarray:
    coded = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(coded <= 0.04045, coded / 12.92, ((coded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(VISION[eye] @ linear, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])

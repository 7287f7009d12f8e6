"""What all figures share: the same picture from the same figure, whatever the thread and the user's settings."""

import base64
import re
import subprocess
import sys
import threading
import warnings

import matplotlib as mpl
import matplotlib.colors
import pandas as pd
from matplotlib.figure import Figure
from pictures import inside, legend, run
from test_plots import layers

from workbench.detection.spike_table import find_spikes
from workbench.figures import add_legend, blank, img, number, plain, png
from workbench.plots import layer_norms, row_losses
from workbench.screen.timeline_figure import timeline


def every_figure():
    steps = run(80, spike_at=70, spike=12.0)
    small = layers(blocks=1, kinds=("activation",))
    share = pd.DataFrame({"row": [0, 1], "loss": [2.0, 3.0], "share": [0.4, 0.6]})
    return [
        timeline(steps, find_spikes(steps), step=70, checkpoints=[0, 40], title="a $x$ run"),
        layer_norms(small, step=10, kinds=["activation"], neighbours=small.assign(step=9)),
        row_losses(share, step=10),
    ]


def test_png_is_the_same_bytes_again_and_in_four_threads():
    expected = [png(figure) for figure in every_figure()]
    assert len(set(expected)) == 3
    assert all(picture.startswith(b"\x89PNG") and b"matplotlib" not in picture.lower() for picture in expected)
    found = {}

    def work(name):
        found[name] = [png(figure) for figure in every_figure()]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_img_is_one_tag_with_escaped_alt_and_size():
    figure = timeline(run())
    tag = img(figure, 'loss of "a" & <b>')
    match = re.fullmatch(
        r'<img alt="(.*)" width="900" height="640" decoding="sync" src="data:image/png;base64,([A-Za-z0-9+/=]+)">', tag
    )
    assert match and match[1] == "loss of &quot;a&quot; &amp; &lt;b&gt;"
    assert base64.b64decode(match[2]) == png(figure)
    assert 'width="450" height="320"' in img(figure, "", 450)
    figure.set_dpi(200)
    assert 'width="900" height="640"' in img(figure, "", 900)


def test_a_dark_theme_of_the_user_changes_nothing():
    def look():
        figure = timeline(run(), step=5)
        picture, axes = png(figure), figure.axes[2]
        written = [axes.yaxis.label, axes.get_xticklabels()[0], *figure.legends[0].get_texts(), *figure.texts]
        return (
            axes.get_facecolor(),
            [mpl.colors.to_hex(text.get_color()) for text in written],
            picture[:24],
        )  # the header has the size

    theme = {"text.color": "white", "axes.facecolor": "black", "axes.labelcolor": "white", "savefig.bbox": "tight"}
    plain = look()
    with mpl.rc_context(theme | {"figure.dpi": 50, "xtick.color": "white", "axes.formatter.use_mathtext": True}):
        assert look() == plain


def test_dollar_signs_are_not_mathematics():
    figure = timeline(run(), title="$HOME and $x")
    assert figure.texts[0]._preprocess_math(figure.texts[0].get_text()) == ("$HOME and $x", False)


def test_number():
    cases = {0: "0", 0.25: "0.25", 1500: "1500", 3e-4: "3e-4", 2.5e-5: "2.5e-5", 1e6: "1e6", -2e-7: "-2e-7"}
    assert {value: number(value) for value in cases} == cases
    assert number(0.1 + 0.2) == "0.3" and number(3e-4 + 1e-19) == "3e-4"


def test_figures_are_built_without_pyplot_and_mlx():
    code = (
        "import sys, workbench.figures as f, workbench.screen.timeline_figure as p, pandas as pd;"
        "f.png(p.timeline(pd.DataFrame({'step': [1], 'loss': [2.0]})));"
        "assert not {'matplotlib.pyplot', 'mlx', 'mlx.core', 'ipywidgets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert isinstance(timeline(run()), Figure)


def test_long_names_of_runs_leave_each_its_place_in_the_legend():
    names = [f"sweep-{'lr3e-4-wd0.1-' * 7}attempt-{number}" for number in range(5)]
    figure = blank(4)
    axes = figure.subplots()
    for name in [*names, "mine"]:
        axes.plot([0, 1], label=name)
    add_legend(figure, [axes])
    said = legend(figure)
    assert len(set(said)) == 6 and "mine" in said and all(text.startswith("sweep-lr3e-4") for text in said[:5])
    assert [text[-9:] for text in said[:5]] == [f"attempt-{number}" for number in range(5)] and inside(figure)


def test_a_name_with_letters_that_no_font_has_is_drawn_without_a_warning():
    name = "lauf \N{CJK UNIFIED IDEOGRAPH-65E5}\N{CJK UNIFIED IDEOGRAPH-672C} é ✓"
    assert plain(name) == "lauf □□ é ✓"  # what it has stays
    figure = blank(1.0)
    figure.text(0.1, 0.5, plain(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png(figure)

"""Tables and folders of pictures as they lie on disks: read as they are meant, or refused."""

import gzip
import itertools
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageOps

from fedntk.simulations import Config
from fedntk.simulations.data.data import Data
from fedntk.simulations.data.load import load_data

from .outcomes import refused

NATURAL = {"client_column": "site", "partition": "natural"}


def rows(labels: list[str], count: int = 40, more: tuple[str, ...] = ()) -> str:
    """Write two columns of numbers, the labels in turn, and perhaps the owners in turn."""
    numbers = np.random.default_rng(0).normal(size=(count, 2)).round(3)
    turns = (itertools.cycle(labels), *([itertools.cycle(more)] if more else []))
    return "".join(
        ",".join([str(a), str(b), *map(next, turns)]) + "\n" for a, b in numbers.tolist()
    )


def table(path: Path, text: str, encoding: str = "utf-8") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return f"csv:{path}"


def load(dataset: str, **options: object) -> Data:
    return load_data(Config(dataset=dataset, **options))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["001", "002", "A03"], ("001", "002", "A03")),
        (["001", "002"], ("001", "002")),  # the zeros are part of the name
        (["1", "1.0", "2"], (1, 2)),
        (["0.000e+00", "1.000e+00"], ()),  # 0 and 1, as numpy.savetxt writes them
        (["-1", "+1"], (-1, 1)),
        (["low", "None", "NA", "null", "nan"], ("NA", "None", "low", "nan", "null")),
        ([" oak ", "oak", "elm"], ("elm", "oak")),
        (['"a,b"', '"c\nd"'], ("a,b", "c\nd")),
        (["12345678901234567890", "12345678901234567891"],) * 2,  # float64 has them alike
    ],
)
def test_labels_are_text_unless_all_are_numbers(tmp_path, labels, classes):
    data = load(table(tmp_path / "t.csv", "a,b,label\n" + rows(labels)))
    assert (data.classes, data.num_classes) == (tuple(classes), len(classes) or 2)


def test_all_files_and_all_chunks_have_one_schema(tmp_path):
    """What is text in one place is text everywhere: no owner or class is two, or none."""
    head, sites = "a,b,label,site\n", ("001", "002")
    table(tmp_path / "d/Train.csv", head + rows(["1", "2", "A"], more=("1", "2", "A03")))
    table(tmp_path / "d/test_set.csv", head + rows(["1", "2"], more=("1", "2")))
    data = load(f"csv:{tmp_path}/d", **NATURAL, num_clients=3)
    assert data.classes == ("1", "2", "A")
    assert {*data.natural_ids_test} == {"1", "2"} < {*data.natural_ids}
    # 200,000 rows are several of pandas' chunks, of which only the last has a letter
    numbers = rows(["0", "1"], more=sites) * 5000 + rows(["0", "1"], 2, more=("A03",))
    data = load(table(tmp_path / "long.csv", head + numbers), **NATURAL, num_clients=3)
    assert {*data.natural_ids} == {"001", "002", "A03"}
    # parquet files, each with its own types
    for part, kind in (("train", str), ("test", int)):
        frame = pd.DataFrame({"a": range(20), "label": [1, 2] * 10, "site": [1, 2] * 10})
        types = {"label": kind, "site": kind}
        frame.astype(types).to_parquet(tmp_path / f"{part}.parquet")
    data = load(f"parquet:{tmp_path}", **NATURAL, num_clients=2)
    assert data.classes == ("1", "2") == tuple(sorted({*data.natural_ids_test}))


@pytest.mark.parametrize(
    ("ids", "owners"),
    [
        (("NA", "DE", "FR"), {"NA", "DE", "FR"}),
        (("1e5", "2e5", "30"), {"1e5", "2e5", "30"}),
        (("9007199254740993", "9007199254740992"), {"9007199254740993", "9007199254740992"}),
        (("3", "4.0"), {3, 4}),
    ],
)
def test_owners_are_told_apart(tmp_path, ids, owners):
    text = "a,b,label,site\n" + rows(["x", "y"], 60, ids)
    data = load(table(tmp_path / "t.csv", text), **NATURAL, num_clients=len(ids))
    assert {*data.natural_ids.tolist()} == owners


@pytest.mark.parametrize("packed", [False, True])
def test_forms_of_one_table(tmp_path, packed):
    """An end comma, an index, blanks, a byte order mark, other line ends: the same numbers."""
    plain = "a,b,label\n" + rows(["x", "y"])
    lines = plain.splitlines()
    forms = {
        "commas": "\n".join([lines[0], *(f"{line}," for line in lines[1:])]),
        "all commas": "\n".join(f"{line}," for line in lines),
        "index": "\n".join([f",{lines[0]}", *(f"{i},{s}" for i, s in enumerate(lines[1:]))]),
        "blanks": plain.replace(",", " , "),
        "mark": "\ufeff" + plain.replace("\n", "\r\n\r\n"),
        "quotes": plain.replace("a,b,label", '"a","b","label"'),
    }
    expected = load(table(tmp_path / "plain.csv", plain))
    for name, text in forms.items():
        place = table(tmp_path / f"{name}.csv", text)
        if packed:
            file = tmp_path / f"{name}.csv.gz"
            file.write_bytes(gzip.compress(text.encode()))
            place = f"csv:{file}"
        data = load(place)
        assert (data.columns, data.classes) == (("a", "b"), ("x", "y"))
        np.testing.assert_array_equal(data.x_train, expected.x_train)


TABLE = "a,b,label\n" + rows(["x", "y"])


@pytest.mark.parametrize(
    ("text", "encoding", "message"),
    [
        (TABLE.replace(",", ";"), "utf-8", "set separator = semicolon, and decimal = comma"),
        (TABLE.replace(",", "\t"), "utf-8", "set separator = tab"),
        (TABLE.replace("x", "hêtre"), "latin-1", "expected text in utf-8, .* set encoding"),
        (TABLE, "utf-16", "expected text in utf-8"),
        ("a,b,label\n" + "1,5,2,x\n1,7,2,y\n" * 9, "utf-8", "as many cells in each row as"),
        ("a,b,label\n1,2,x\n1,2,3,y\n", "utf-8", "as many cells in each row as"),
        ("a,b,label\n" + "?,1,x\n3,1,y\n" * 9, "utf-8", r"others in a \('\?'\).* empty cell"),
        ('a,b,label\n"1,5",1,x\n', "utf-8", r"others in a \('1,5'\).* decimal"),
        ("a,b,label\n" + rows(["0", "1", "NA"], 30), "utf-8", r"gaps \(rows\): label \(10\)"),
        ("a,b,label\n" + rows(["x", "?", ""], 30), "utf-8", r"gaps \(rows\): label \(20\)"),
        ("a,b,label\n" + rows([f'"{i},5"' for i in range(40)]), "utf-8", "40 different words"),
        ("a, a,label\n1,2,x\n", "utf-8", "columns of different names, got twice a"),
        (rows(["x", "y"]), "utf-8", "train set: target: the set has the columns .* x, got 'label'"),
        ("", "utf-8", "No columns to parse"),
        ("a,b,label\n", "utf-8", "expected two classes or more, got 0"),
        ("a,b,label\n" + "inf,1,x\n3,1,y\n" * 9, "utf-8", "got NaN or infinity"),
    ],
)
def test_tables_that_cannot_be_read_rightly_are_refused(tmp_path, text, encoding, message):
    refused(message, load, table(tmp_path / "t.csv", text, encoding))


@pytest.mark.parametrize("separator", ["semicolon", "tab", "bar"])
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "utf-8"])
def test_a_table_of_another_country_has_the_examples_of_the_plain_one(
    tmp_path, separator, encoding
):
    """Its decimal commas are points, in labels too; 1.000 is the name that is written there."""
    plain = "größe,b,label\n" + rows(["0.0", "1.0", "2.0"])
    expected = load(table(tmp_path / "plain.csv", plain))
    mark = {"semicolon": ";", "tab": "\t", "bar": "|"}[separator]
    changes = str.maketrans({",": mark, ".": ","})
    how = {"separator": separator, "decimal": "comma", "encoding": encoding}
    data = load(table(tmp_path / "own.csv", plain.translate(changes), encoding), **how)
    assert (data.columns, data.classes) == (expected.columns, expected.classes)
    np.testing.assert_array_equal(data.x_train, expected.x_train)
    np.testing.assert_array_equal(data.y_train, expected.y_train)
    text = f"a{mark}b{mark}label\n" + rows(["1.000", "2.000"]).translate(changes)
    thousands = text.replace("1,000\n", "1.000\n").replace("2,000\n", "2.000\n")
    data = load(table(tmp_path / "own.csv", thousands, encoding), **how)
    assert data.classes == ("1.000", "2.000")


def test_a_table_is_not_read_with_settings_that_cannot_be_its():
    refused("decimal = comma: expected another separator", Config, decimal="comma")
    refused("encoding: expected the name of", Config, encoding="latin-l")
    refused("encoding: expected the name of", Config, encoding="rot13")


def test_parts_of_a_table_that_do_not_fit_are_refused_or_said(tmp_path, caplog):
    table(tmp_path / "train.csv", TABLE)
    table(tmp_path / "validation.csv", TABLE)
    table(tmp_path / "labels.csv", TABLE)
    assert len(load(f"csv:{tmp_path}").y_test) == 8
    assert "data: not used: labels, validation" in caplog.text
    table(tmp_path / "train_2.csv", TABLE)
    refused("one part for each of train, .* got train, train_2", load, f"csv:{tmp_path}")
    load(table(tmp_path / "own.csv", "a,b,label\n" + rows(["Oak", "oak", "elm"])))
    assert "classes 'Oak' and 'oak' are taken for two" in caplog.text


# ----------------------------------------------------------------------- pictures


def pictures(place: Path, *classes: str, count: int = 5, suffix: str = "png", **more: object):
    """Write pictures whose first pixel says which they are."""
    for name in classes:
        (place / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture = Image.new("RGB", (6, 4), (20 * i, 7, len(name)))
            picture.save(place / name / f"{i}.{suffix}", **more)


@pytest.mark.parametrize(
    ("train", "test"),
    [("Train", "Test"), ("TRAIN", "testing"), ("training_set", "test_set"), ("train images", "")],
)
def test_splits_are_read_by_their_names_in_any_case(tmp_path, caplog, train, test):
    pictures(tmp_path / train, "cat", "dog")
    pictures(tmp_path / "Val", "cat", "dog")
    if test:
        pictures(tmp_path / test, "cat", "dog", count=3)
    data = load(f"folder:{tmp_path}")
    assert data.classes == ("cat", "dog")
    assert (len(data.y_train), len(data.y_test)) == ((10, 6) if test else (8, 2))
    assert "data: not used: validation" in caplog.text


def test_hidden_entries_are_no_classes_and_no_examples(tmp_path):
    """Of editors, systems and archives; beside the classes, in them, and in their folders."""
    pictures(tmp_path, "cat", "dog", suffix="PNG")
    hidden = (".ipynb_checkpoints", "__MACOSX", "@eaDir", ".git")
    for place in (tmp_path, tmp_path / "cat", tmp_path / "cat" / "more"):
        pictures(place, *hidden)
        for name in ("._0.png", ".DS_Store", "Thumbs.db", "desktop.ini"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_bytes(b"\0")
    data = load(f"folder:{tmp_path}")
    assert (data.classes, len(data.y_train) + len(data.y_test)) == (("cat", "dog"), 10)


def test_a_class_may_have_folders_but_not_the_name_of_a_split(tmp_path):
    pictures(tmp_path / "a", "cat/day1", "cat/day2", "dog/day1")
    assert load(f"folder:{tmp_path}/a").classes == ("cat", "dog")
    pictures(tmp_path / "b", "test", "control")
    refused("of control, test; a class cannot have", load, f"folder:{tmp_path}/b")


def save_deep(file: Path) -> None:
    """Write a picture of 16 bits, as large as the others, which become grey ones of 8."""
    for path in file.parent.parent.glob("*/?.png"):
        Image.new("L", (6, 4)).save(path)
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(file)


@pytest.mark.parametrize(
    ("file", "write", "message"),
    [
        ("cat/9.png", lambda file: file.write_bytes(
            (file.parent / "0.png").read_bytes()[:-30]), "9.png cannot be read .*truncated"),
        ("cat/9.png", lambda file: file.write_text("no picture"), "cat/9.png cannot be read"),
        ("cat/9.png", lambda file: file.symlink_to("/nowhere.png"), "cat/9.png cannot be read"),
        ("cat/9.png", Image.new("RGBA", (6, 4)).save, "of one size and mode, got"),
        ("cat/9.png", save_deep, r"of one size and mode, got .*\(I;16\)"),
        ("bird/1.heic", Path.touch, "expected pictures in each class, got none in bird"),
    ],
)  # fmt: skip
def test_pictures_that_cannot_be_read_are_named(tmp_path, file, write, message):
    pictures(tmp_path, "cat", "dog")
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write(tmp_path / file)
    refused(message, load, f"folder:{tmp_path}")


def test_folders_that_may_be_splits_are_not_taken_for_classes(tmp_path, caplog):
    for name, parts in {"a": ("seg_train", "seg_test"), "b": ("train", "Training")}.items():
        for part in parts:
            pictures(tmp_path / name / part, "cat", "dog")
    refused("seg_train, which all hold cat, dog; name them train", load, f"folder:{tmp_path}/a")
    refused("one part for each of .* got Training, train", load, f"folder:{tmp_path}/b")
    pictures(tmp_path / "c", "train", "test")
    refused("expected a folder of pictures for each class, got none", load, f"folder:{tmp_path}/c")
    pictures(tmp_path / "d" / "train", "cat", "dog")
    pictures(tmp_path / "d" / "test", "cat", "bird")
    refused("test set: no training example has the labels bird", load, f"folder:{tmp_path}/d")
    pictures(tmp_path / "e", "cat", "dog")
    for name in ("notes.txt", "cat/0.json"):
        (tmp_path / "e" / name).write_text("{}")
    load(f"folder:{tmp_path}/e")
    assert "2 files of " in caplog.text
    assert "e are not used: cat/0.json, notes.txt" in caplog.text


def test_what_hugging_face_would_merge_is_refused(tmp_path):
    """Train and Test are one split to it, and 001 and 1 one number."""
    for part in ("Train", "Test"):
        pictures(tmp_path / "a" / part, "cat", "dog")
    refused("Test of .* is not read as a split", load, f"hf:{tmp_path}/a")
    table(tmp_path / "b" / "train.csv", "a,b,label\n" + rows(["001", "1"]))
    refused("names such as 001 in .*train.csv; use csv:", load, f"hf:{tmp_path}/b")


@pytest.mark.parametrize("turn", [1, 3, 6, 8])
def test_a_photo_is_read_alike_from_everywhere(tmp_path, turn):
    """Turned by its EXIF data: from a folder, by Hugging Face, and by a predictor."""
    exif = Image.Exif()
    exif[0x0112] = turn
    pixels = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3), np.uint8)
    for name, picture in itertools.product(("cat", "dog"), range(5)):
        file = tmp_path / name / f"{picture}.jpg"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[picture]).save(file, exif=exif)
    ours, theirs = load(f"folder:{tmp_path}"), load(f"hf:{tmp_path}")
    assert ours.input_shape == ((3, 4, 6) if turn in (1, 3) else (3, 6, 4))
    with Image.open(tmp_path / "cat" / "2.jpg") as photo:
        upright = np.asarray(ImageOps.exif_transpose(photo)).transpose(2, 0, 1)
        for data in (ours, theirs):
            every = {x.tobytes() for x in (*data.x_train, *data.x_test)}
            assert upright.tobytes() in every
            assert len(every) == 5
            np.testing.assert_array_equal(data.inputs(photo), data.inputs(upright[None]))
    column = datasets.Dataset.from_dict(
        {"image": [str(tmp_path / "cat" / "2.jpg")], "label": [0]},
        features=datasets.Features(image=datasets.Image(), label=datasets.Value("int64")),
    )
    np.testing.assert_array_equal(ours.inputs(column[0]["image"]), ours.inputs(upright[None]))

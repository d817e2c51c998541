"""The structure of gradlab: imports, complexity, annotations, names. Every check is also tried on a
planted fault."""

import textwrap

import pytest
import structure
from paths import ROOT

SOURCES = structure.read_package(ROOT / "gradlab")
STUB = (ROOT / "gradlab" / "__init__.pyi").read_text()

HELPER = ("gradlab",)
FIT = tuple(
    f"gradlab.fit.{room}"
    for room in (
        "keras_private",
        "replicas",
        "losses",
        "variables",
        "metrics",
        "program",
        "sizes",
        "run",
    )  # each may use those before it
)
CORE = (*HELPER, "gradlab.fit", *FIT, "gradlab.measure", "gradlab.drawing")
IN_ORDER = ("experiments", "figures", "widget", "widget.course")
LAB_PARTS = (*IN_ORDER, "exercises", "reproduce", "new_process")
LAB = ("gradlab.lab", *(f"gradlab.lab.{name}" for name in LAB_PARTS))
WINGS = {
    # wing -> the wings that it may import
    "gradlab": (),
    **{room: (*HELPER, *FIT[:place]) for place, room in enumerate(FIT)},
    "gradlab.fit": (*HELPER, *FIT),
    "gradlab.measure": (*HELPER, "gradlab.fit", *FIT),
    "gradlab.drawing": HELPER,
    "gradlab.auditing": HELPER,
    "gradlab.auditing.adapters": (*CORE, "gradlab.auditing"),
    "gradlab.lab.experiments": CORE,
    "gradlab.lab.figures": (*CORE, "gradlab.lab.experiments"),
    "gradlab.lab.widget": (*CORE, "gradlab.lab.experiments", "gradlab.lab.figures"),
    "gradlab.lab.widget.course": (
        *CORE,
        "gradlab.auditing",
        "gradlab.lab.figures",
        "gradlab.lab.widget",
    ),
    "gradlab.lab.new_process": CORE,
    "gradlab.lab.reproduce": (*CORE, "gradlab.lab.experiments", "gradlab.lab.figures"),
    "gradlab.lab.exercises": (
        *CORE,
        "gradlab.auditing",
        *(f"gradlab.lab.{name}" for name in (*IN_ORDER, "new_process")),
    ),
    "gradlab.lab": (*CORE, *LAB[1:]),  # doctor, course, and the path of predict
    "gradlab.__main__": (*CORE, "gradlab.auditing", *LAB),
}
PRIVATE_PACKAGES = ("keras.src", "tensorflow.python", "tf.python")
PRIVATE_NAMES = (
    "_all_reduce_sum_gradients", "_compile_loss", "_flatten_layers", "_fn_kwargs", "_keras_mask", "_loss_tracker",
    "_symbolic_build", "_get_function",
)  # fmt: skip
# The only modules that may use private parts of Keras and TensorFlow, and say why.
INTERNALS = (
    "gradlab.fit.keras_private",
    "gradlab.drawing._tensorflow_internals",
    "gradlab.lab.widget._ipykernel_internals",
)
# The packages `experiments` and `methods` contain the modules `experiment` and `method`; the lab's
# `record` records runs, and `fit.records` has the records of updates.
CLEAR_NAMES = (("experiment", "experiments"), ("method", "methods"), ("record", "records"))
# Modules of gradlab.lab with the same name: `gradlab.lab.predict` is the path that the notebooks show
# of `widget.course.predict`; `gradlab.lab.course` is the path that a guide shows of what is behind
# the command `gradlab lab`, and `widget.course` has the course's widgets.
SAME_NAMES = ("course", "predict")


def report(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_the_package_was_read():
    assert {
        "gradlab.__init__",
        "gradlab.window",
        "gradlab.lab.experiments.jobs.run",
    } <= SOURCES.keys()
    graph = structure.import_graph(SOURCES, STUB)
    assert (
        "gradlab.averaging" in graph["gradlab.window"]
        and "gradlab.window" in graph["gradlab.fit.program.update"]
    )


def test_no_modules_import_each_other_in_a_circle():
    report(structure.import_circles(structure.import_graph(SOURCES, STUB)))


def test_imports_between_wings_run_one_way():
    report(structure.forbidden_imports(structure.import_graph(SOURCES, STUB), WINGS))


def test_no_function_is_too_complex():
    report(structure.too_complex(SOURCES, 10))


def test_public_functions_are_annotated():
    report(structure.missing_annotations(SOURCES))


def test_private_parts_of_other_libraries_are_used_in_three_modules_only():
    checked = {name: text for name, text in SOURCES.items() if name not in INTERNALS}
    report(structure.foreign_private_names(checked, PRIVATE_PACKAGES, PRIVATE_NAMES))
    for name in INTERNALS:
        assert structure.foreign_private_names(
            {name: SOURCES[name]}, PRIVATE_PACKAGES, PRIVATE_NAMES
        )


def test_no_two_public_classes_have_the_same_name():
    report(structure.repeated_class_names(SOURCES))


def test_no_two_modules_of_the_lab_have_the_same_name():
    lab = {name: text for name, text in SOURCES.items() if name.startswith("gradlab.lab.")}
    assert len(lab) > 50
    report(structure.repeated_module_names(lab, SAME_NAMES))


def test_no_module_names_differ_only_by_a_plural_s():
    report(structure.confusable_modules(SOURCES, CLEAR_NAMES))


# ---- the checks find planted faults ----


def package(**modules: str) -> dict[str, str]:
    """Synthetic sources of a package `house`; two underscores in a name stand for a dot."""
    sources = {
        "house.__init__": "",
        **{f"house.{n.replace('__', '.')}": text for n, text in modules.items()},
    }
    return {name: textwrap.dedent(text) for name, text in sources.items()}


@pytest.mark.parametrize(
    "text",
    [
        "import house.b",
        "from house import b",
        "from house.b import thing",
        "from . import b",
        "from .b import thing",
        "def later():\n    from house.b import thing",
        "import house\nmade = house.Thing()",
        "from house import Thing",
    ],
)
def test_a_planted_import_circle_is_found(text):
    stub = "from .b import Thing as Thing\n"
    clean = package(a="", b="import house.a", c="import house.a, house.b")
    assert structure.import_circles(structure.import_graph(clean, stub)) == []
    found = structure.import_circles(structure.import_graph({**clean, "house.a": text}, stub))
    assert found == ["import circle: house.a -> house.b -> house.a"]


def test_a_planted_circle_of_three_and_one_within_a_package_are_found():
    three = package(a="import house.b", b="import house.c", c="import house.a", d="import house.a")
    assert structure.import_circles(structure.import_graph(three)) == [
        "import circle: house.a -> house.b -> house.c -> house.a"
    ]
    nested = package(lab__one="from house.lab import two", lab__two="from .one import x")
    assert structure.import_circles(structure.import_graph(nested)) == [
        "import circle: house.lab.one -> house.lab.two -> house.lab.one"
    ]
    through_init = {
        **package(lab__one="from house.lab import thing"),
        "house.lab.__init__": "from .one import x",
    }
    assert len(structure.import_circles(structure.import_graph(through_init))) == 1


def test_a_planted_import_against_the_direction_is_found():
    wings = {"house": (), "house.measure": ("house",), "house.lab": ("house", "house.measure")}
    clean = package(
        top="", measure__noise="import house.top", lab__run="from house.measure import noise"
    )
    assert structure.forbidden_imports(structure.import_graph(clean), wings) == []
    stub = "from .lab.run import Run as Run\nfrom .measure import noise as noise\n"
    for text in (
        "import house.lab.run",
        "from house.lab import run",
        "import house\nx = house.Run()",
    ):
        graph = structure.import_graph({**clean, "house.top": text}, stub)
        assert structure.forbidden_imports(graph, wings) == [
            "house.top must not import house.lab.run: house may import none"
        ]
    graph = structure.import_graph(
        {**clean, "house.top": "import house\nx = house.noise.scale()"}, stub
    )
    assert structure.forbidden_imports(graph, wings) == [
        "house.top must not import house.measure.noise: house may import none"
    ]


@pytest.mark.parametrize(
    "branches",
    [
        "    if x: ...\n" * 9,
        "    if x: ...\n" + "    elif x: ...\n" * 8 + "    else: ...\n",
        "    for i in x: ...\n    while x: ...\n    def g(): ...\n" * 3,
        "    try: ...\n    except A: ...\n    except B: ...\n    else: ...\n    finally: ...\n" * 3,
        "    match x:\n"
        + "".join(f"        case {i}: ...\n" for i in range(9))
        + "        case _: ...\n",
    ],
)
def test_a_planted_complex_function_is_found(branches):
    """One that has 9 branches is just simple enough, and one with another branch is not."""
    function = f"class C:\n  def f(x):\n{branches}"
    assert structure.too_complex({"house.a": function}, 10) == []
    assert structure.too_complex({"house.a": f"{function}    if x: ...\n"}, 10) == [
        "house.a.C.f has the complexity 11, more than 10"
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("def f(x): ...", "house.a.f: no annotation for x, return"),
        ("def f(x: int): ...", "house.a.f: no annotation for return"),
        ("def f(*args, **kwargs) -> None: ...", "house.a.f: no annotation for args, kwargs"),
        ("def f(*, x=1) -> None: ...", "house.a.f: no annotation for x"),
        ("if True:\n    def f(x) -> None: ...", "house.a.f: no annotation for x"),
        ("class C:\n    def __init__(self, x): ...", "house.a.C.__init__: no annotation for x"),
        ("class C:\n    @property\n    def x(self): ...", "house.a.C.x: no annotation for return"),
        (
            "class C:\n    @staticmethod\n    def x(y) -> int: ...",
            "house.a.C.x: no annotation for y",
        ),
        (
            "class C:\n    class D:\n        def x(self, y) -> int: ...",
            "house.a.C.D.x: no annotation for y",
        ),
    ],
)
def test_a_planted_missing_annotation_is_found(text, fault):
    assert structure.missing_annotations(package(a=text)) == [fault]


def test_private_functions_need_no_annotations():
    clean = """
        def _f(x): ...
        class _C:
            def f(self, x): ...
        class C:
            def __init__(self, x: int, *args: int): ...
            def _g(self, x): ...
            @classmethod
            def h(cls, x: int) -> None:
                def inner(y): ...
    """
    assert structure.missing_annotations(package(a=clean)) == []


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("from keras.src.losses.loss import squeeze", "keras.src.losses.loss"),
        ("from keras import src", "keras.src"),
        ("import keras\nkeras.src.losses", "keras.src"),
        ("import tensorflow.python.eager", "tensorflow.python.eager"),
        ("import tensorflow as tf\ntf.python.eager", "tf.python"),
        (
            "def f(optimizer):\n    optimizer._all_reduce_sum_gradients = list",
            "_all_reduce_sum_gradients",
        ),
        ("def f(model):\n    return model._flatten_layers()", "_flatten_layers"),
        ("def f(tensor):\n    return getattr(tensor, '_keras_mask', None)", "_keras_mask"),
        ("class C:\n    def f(self):\n        self._loss_tracker = None", "_loss_tracker"),
        ("def f(graph):\n    return graph._never_heard_of", "_never_heard_of"),
    ],
)
def test_a_planted_use_of_private_parts_is_found(text, used):
    found = structure.foreign_private_names(package(a=text), PRIVATE_PACKAGES, PRIVATE_NAMES)
    assert len(found) == 1 and f"uses {used}," in found[0]


def test_private_names_of_the_package_may_be_used():
    clean = "class C:\n    _x = 1\n    def f(self, other):\n        self._y = other._x\n"
    clean += "        return other.__class__, os._exit"
    assert structure.foreign_private_names(package(a=clean), PRIVATE_PACKAGES, PRIVATE_NAMES) == []


def test_planted_names_that_collide_are_found():
    sources = package(
        a="class Update: ...\nclass _Hidden: ...", lab__b="class Update: ...\nclass _Hidden: ..."
    )
    assert structure.repeated_class_names(sources) == [
        "class Update is defined in house.a and house.lab.b"
    ]
    assert structure.repeated_class_names(package(a="class One: ...", b="class Two: ...")) == []
    similar = package(window="", training__windows="", lab__result="", lab__results="", other="")
    assert structure.confusable_modules(similar, (("result", "results"),)) == [
        "house.training.windows and house.window differ only by a plural s"
    ]


def test_planted_modules_of_the_same_name_are_found():
    clean = package(a="", lab__b="", lab__c__d="")
    clean |= {"house.__main__": "", "house.lab.__main__": ""}
    assert structure.repeated_module_names(clean) == []
    planted = package(memory="", lab__memory="", lab__b__c="") | {"house.c.__init__": ""}
    memory = "house.lab.memory and house.memory have the same name"
    c = "house.c and house.lab.b.c have the same name"
    assert structure.repeated_module_names(planted) == [c, memory]
    assert structure.repeated_module_names(planted, ("c",)) == [memory]
    assert structure.repeated_module_names(planted, ("c", "memory")) == []
    assert structure.repeated_module_names(clean, ("d",)) == [
        "d is allowed twice, and is there once"
    ]

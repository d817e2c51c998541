"""Models of KerasHub, in their smallest shapes and with random weights: the large batch's weights, or a
sentence that says what to do. Runs where keras_hub is installed, the extra "hub"."""

import keras
import numpy as np
import pytest

import gradlab

hub = pytest.importorskip("keras_hub")

TEXTS = 20
LENGTH = 12
WORDS = 50
ATTENTION = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}


@pytest.fixture(scope="module")
def texts() -> dict:
    """Texts of 4 to 12 words, padded, with the word that follows each."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, WORDS, [TEXTS, LENGTH])
    lengths = rng.integers(4, LENGTH + 1, [TEXTS, 1])
    mask = (np.arange(LENGTH) < lengths).astype("int32")
    inputs = {"token_ids": tokens, "padding_mask": mask}
    return {"x": inputs, "y": np.roll(tokens, -1, 1), "sample_weight": mask.astype("float32")}


def crossentropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def gemma(rank: int | None = None):
    backbone = hub.models.GemmaBackbone(**ATTENTION, head_dim=8)
    if rank:
        backbone.enable_lora(rank)
    return hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


def mixtral(aux: float = 0.02):
    experts = {"num_experts": 4, "top_k": 2, "router_aux_loss_coef": aux}
    backbone = hub.models.MixtralBackbone(**ATTENTION, **experts)
    return hub.models.MixtralCausalLM(backbone=backbone, preprocessor=None)


def bert():
    sizes = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16, "intermediate_dim": 32}
    backbone = hub.models.BertBackbone(
        vocabulary_size=WORDS, **sizes, max_sequence_length=LENGTH, dropout=0.0
    )
    return hub.models.BertTextClassifier(backbone, num_classes=3, preprocessor=None, dropout=0.0)


def siglip():
    sizes = {"hidden_dim": 16, "num_layers": 1, "num_heads": 2, "intermediate_dim": 32}
    images = hub.models.SigLIPVisionEncoder(patch_size=4, image_shape=(8, 8, 3), **sizes)
    words = hub.models.SigLIPTextEncoder(
        vocabulary_size=WORDS, embedding_dim=16, max_sequence_length=6, projection_dim=16, **sizes
    )
    return hub.models.SigLIPBackbone(vision_encoder=images, text_encoder=words)


def difference(make, optimizer, loss, data, size, whole=None, **options) -> float:
    """How far the weights of a microbatched model are from those of the large batch, relative to the
    way that these went, after two epochs."""
    ends = []
    for cut in (False, True):
        keras.utils.set_random_seed(1)
        model = make()
        before = [np.array(each) for each in model.trainable_variables]
        if cut:
            model = gradlab.microbatched(model, size, **options)
        compiled = whole if cut and whole is not None else loss()
        model.compile(optimizer=optimizer(), loss=compiled, weighted_metrics=[])
        model.fit(**data, batch_size=8, epochs=2, shuffle=False, verbose=0)
        ends.append([np.array(each) for each in model.trainable_variables])

    def norm(one, other):
        return np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(one, other)))

    moved = norm(ends[0], before)
    assert moved > 1e-3
    return norm(*ends) / moved


@pytest.mark.parametrize("size", [3, "auto"])
@pytest.mark.parametrize("rank", [None, 2])
def test_a_causal_language_model(texts, rank, size):
    made = difference(
        lambda: gemma(rank), lambda: keras.optimizers.SGD(0.1), crossentropy, texts, size
    )
    assert made < 1e-5


def test_low_rank_adapters_with_adam(texts):
    made = difference(lambda: gemma(2), lambda: keras.optimizers.Adam(1e-3), crossentropy, texts, 3)
    assert made < 1e-5


@pytest.mark.parametrize("size", [3, "auto"])
def test_a_classifier(texts, size):
    tokens = texts["x"]["token_ids"]
    data = {
        "x": texts["x"] | {"segment_ids": np.zeros_like(tokens)},
        "y": np.random.default_rng(1).integers(0, 3, TEXTS),
    }
    assert difference(bert, lambda: keras.optimizers.SGD(0.1), crossentropy, data, size) < 1e-5


def test_a_mixture_of_experts(texts):
    """Its balance of experts is a product of means over the batch, so it is refused. Without it, what
    is left is 0, and so a mean."""
    model = gradlab.microbatched(mixtral(), 3)
    model.compile("sgd", crossentropy(), weighted_metrics=[])
    with pytest.raises(
        ValueError, match='moe_block.* one number for the whole batch.* batch_losses="mean"'
    ):
        model.fit(**texts, batch_size=8, verbose=0)
    made = difference(
        lambda: mixtral(0.0),
        lambda: keras.optimizers.SGD(0.1),
        crossentropy,
        texts,
        3,
        batch_losses="mean",
    )
    assert made < 1e-5


def pairs(images, words):
    """The loss of SigLIP over all pairs of images and texts."""
    images, words = (each / keras.ops.norm(each, axis=1, keepdims=True) for each in (images, words))
    count = keras.ops.shape(images)[0]
    signs = 2 * keras.ops.eye(count) - 1
    logits = 10.0 * images @ keras.ops.transpose(words) - 10.0
    return -keras.ops.sum(keras.ops.log_sigmoid(signs * logits)) / keras.ops.cast(count, "float32")


def whole_loss(unused, both):
    return pairs(*keras.ops.split(both, 2, axis=1))


def test_pairs_of_images_and_texts():
    rng = np.random.default_rng(2)
    images = rng.normal(size=[TEXTS, 8, 8, 3]).astype("float32")
    words = rng.integers(1, WORDS, [TEXTS, 6])
    model = gradlab.microbatched(siglip(), 3)
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    labels = dict.fromkeys(("vision_logits", "text_logits"), np.zeros([TEXTS, 8]))
    with pytest.raises(ValueError, match="one number for the whole batch.* gradlab.WholeBatch"):
        model.fit({"images": images, "token_ids": words}, labels, batch_size=8, verbose=0)

    def embeddings():
        backbone = siglip()
        inputs = [keras.Input([8, 8, 3]), keras.Input([6], dtype="int32")]
        parts = [backbone.get_vision_embeddings(inputs[0]), backbone.get_text_embeddings(inputs[1])]
        return keras.Model(inputs, keras.layers.Concatenate()(parts))

    made = difference(
        embeddings,
        lambda: keras.optimizers.SGD(0.1),
        lambda: whole_loss,
        {"x": [images, words], "y": np.zeros([TEXTS, 1])},
        3,
        gradlab.WholeBatch(whole_loss),
    )
    assert made < 1e-5


def test_a_detector_with_a_loss_of_its_own():
    encoder = hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        use_pre_activation=False,
        image_shape=(64, 64, 3),
    )
    backbone = hub.models.RetinaNetBackbone(
        image_encoder=encoder, min_level=3, max_level=4, use_p5=False, image_shape=(64, 64, 3)
    )
    anchors = hub.layers.AnchorGenerator(
        "xyxy", min_level=3, max_level=4, num_scales=1, aspect_ratios=[1.0], anchor_size=4.0
    )
    detector = hub.models.RetinaNetObjectDetector(
        backbone, num_classes=3, bounding_box_format="xyxy", anchor_generator=anchors
    )
    model = gradlab.microbatched(detector, 2)
    focal = keras.losses.BinaryFocalCrossentropy(from_logits=True, reduction="sum")
    boxes_loss = keras.losses.Huber(reduction="sum")
    model.compile("sgd", box_loss=boxes_loss, classification_loss=focal)
    boxes = np.tile(np.array([4, 4, 20, 20], "float32"), [4, 1, 1])
    images = np.zeros([4, 64, 64, 3], "float32")
    with pytest.raises(ValueError, match="compute_loss gives one number for the whole batch"):
        model.fit(images, {"boxes": boxes, "labels": np.ones([4, 1])}, batch_size=4, verbose=0)

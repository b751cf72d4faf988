"""Writes optimizer_golden.inc: the results of 200 steps of Keras's optimizers on one row.

Run once, with Keras 3.15 on TensorFlow; the output was redirected to optimizer_golden.inc.
optimizer_test.cc runs the same steps. The file is a reference, not a record of this library's
results: if the two disagree, the library is wrong.
"""

import dataclasses
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np

DIM = 5
STEPS = 200
INITIAL = [0.5, -0.25, 0.125, -1.0, 2.0]

# Keras's defaults and names, in the order of the operator's `hyper` (docs/operators.md) without the
# iteration.
HYPER = {
    "learning_rate": 0.001,
    "beta_1": 0.9,
    "beta_2": 0.999,
    "epsilon": 1e-7,
    "momentum": 0.0,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
    "learning_rate_power": -0.5,
    "weight_decay": 0.0,
}


def gradients(step: int, poison: bool) -> np.ndarray:
    """The gradient of step 0, 1, ...: exact in float32, so that C++ computes the same."""
    column = np.arange(DIM)
    g = ((step * 37 + column * 101 + step * column * 13) % 201 - 100).astype(np.float32) / 64
    if poison and step == 100:
        g[2] = np.nan
    if poison and step == 120:
        g[3] = np.inf
    return g


class RowwiseAdagrad(keras.optimizers.Optimizer):
    """rowwise_adagrad of fbgemm_gpu/codegen/genscript/optimizers.py, as a Keras optimizer."""

    def __init__(self, learning_rate=0.001, epsilon=1e-7, initial_accumulator_value=0.0, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.epsilon = epsilon
        self.initial = initial_accumulator_value

    def build(self, variables):
        super().build(variables)
        self.accumulators = [keras.Variable([self.initial]) for _ in variables]

    def update_step(self, gradient, variable, learning_rate):
        accumulator = self.accumulators[0]
        accumulator.assign_add([keras.ops.sum(gradient * gradient) / DIM])
        multiplier = learning_rate / (keras.ops.sqrt(accumulator[0]) + self.epsilon)
        variable.assign_sub(multiplier * gradient)


@dataclasses.dataclass
class Case:
    """One line of the golden file.

    `states` are the names of Keras's attributes, in the order of StateWidths.
    """

    name: str
    make: type
    states: tuple[str, ...] = ()
    options: dict = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    poison: bool = False
    inits: tuple[float, ...] = ()


def cases() -> list[Case]:
    o = keras.optimizers
    adam = ("_momentums", "_velocities")
    amsgrad = (*adam, "_velocity_hats")
    sgd = ("momentums",)
    adagrad = ("_accumulators",)
    adamax = ("_m", "_u")
    rms = ("_velocities", "_momentums", "_average_gradients")
    adadelta = ("_accumulated_grads", "_accumulated_delta_vars")
    ftrl = ("_accumulators", "_linears")
    ftrl_all = {
        "l1_regularization_strength": 0.02,
        "l2_regularization_strength": 0.05,
        "l2_shrinkage_regularization_strength": 0.03,
        "beta": 0.7,
        "learning_rate": 0.05,
    }
    nesterov = ("nesterov", "momentum")
    wd = {"weight_decay": 0.004}
    found = [
        Case("sgd", o.SGD, (), {"learning_rate": 0.01}),
        Case("sgd", o.SGD, (), {"learning_rate": 0.01, **wd}),
        Case("sgd", o.SGD, sgd, {"learning_rate": 0.01, "momentum": 0.9}, ("momentum",)),
        Case("sgd", o.SGD, sgd, {"learning_rate": 0.01, "momentum": 0.7, **wd}, nesterov),
        Case("adagrad", o.Adagrad, adagrad, {"learning_rate": 0.05}, inits=(0.1,)),
        Case("adagrad", o.Adagrad, adagrad, {"epsilon": 0.01, **wd}, inits=(0.3,)),
        Case("adam", o.Adam, adam),
        Case("adam", o.Adam, adam, {"learning_rate": 0.02, "beta_1": 0.8, "beta_2": 0.99}),
        Case("adam", o.Adam, adam, {"epsilon": 0.01, "beta_2": 0.99999, **wd}),
        Case("adam", o.Adam, amsgrad, {"learning_rate": 0.01}, ("amsgrad",)),
        Case("adamw", o.AdamW, adam, wd),
        Case("adamw", o.AdamW, amsgrad, {"weight_decay": 0.1}, ("amsgrad",)),
        Case("adamax", o.Adamax, adamax),
        Case("adamax", o.Adamax, adamax, {"beta_1": 0.95, "beta_2": 0.9, "epsilon": 0.1, **wd}),
        Case("rmsprop", o.RMSprop, rms[:1]),
        Case("rmsprop", o.RMSprop, rms[:1], {"beta_1": 0.99, "epsilon": 0.001, **wd}),
        Case("rmsprop", o.RMSprop, rms[:2], {"momentum": 0.8, **wd}, ("momentum",)),
        Case("rmsprop", o.RMSprop, rms[::2], {"learning_rate": 0.01}, ("centered",)),
        Case("rmsprop", o.RMSprop, rms, {"momentum": 0.6, **wd}, ("centered", "momentum")),
        Case("adadelta", o.Adadelta, adadelta, {"learning_rate": 1.0, "beta_1": 0.95}),
        Case("adadelta", o.Adadelta, adadelta, {"learning_rate": 0.5, "epsilon": 1e-4, **wd}),
        Case("ftrl", o.Ftrl, ftrl, inits=(0.1, 0.0)),
        Case("ftrl", o.Ftrl, ftrl, {**ftrl_all, **wd}, inits=(0.1, 0.0)),
        Case("ftrl", o.Ftrl, ftrl, {**ftrl_all, "learning_rate_power": -0.3}, inits=(0.2, 0.0)),
        Case("ftrl", o.Ftrl, ftrl, {"l1_regularization_strength": 100.0}, inits=(0.1, 0.0)),
        Case("lion", o.Lion, ("_momentums",), {"beta_2": 0.99}),
        Case("lion", o.Lion, ("_momentums",), {"beta_1": 0.8, "beta_2": 0.95, **wd}),
        Case("rowwise_adagrad", RowwiseAdagrad, ("accumulators",), {"learning_rate": 0.05}),
        Case(
            "rowwise_adagrad",
            RowwiseAdagrad,
            ("accumulators",),
            {"epsilon": 0.1, **wd},
            inits=(0.5,),
        ),
    ]
    # One case of each optimizer and set of flags, with NaN and infinity among the gradients.
    seen = {}
    for case in found:
        seen.setdefault((case.name, case.flags), dataclasses.replace(case, poison=True))
    return found + list(seen.values())


def run(case: Case) -> tuple[dict, np.ndarray, list[np.ndarray]]:
    hyper = {**HYPER, **case.options}
    accepted = case.make.__init__.__code__.co_varnames
    options = {k: v for k, v in hyper.items() if k in accepted}
    if "rho" in accepted:
        options["rho"] = hyper["beta_1"]
    options["weight_decay"] = hyper["weight_decay"] or None
    options.update({f: True for f in case.flags if f != "momentum"})
    if case.inits:
        options["initial_accumulator_value"] = case.inits[0]
    used = set(options) | ({"beta_1"} if "rho" in options else set())
    assert set(case.options) <= used, (case, options)
    optimizer = case.make(**options)
    variable = keras.Variable(np.array(INITIAL, np.float32))
    for step in range(STEPS):
        optimizer.apply([keras.ops.convert_to_tensor(gradients(step, case.poison))], [variable])
    to_numpy = keras.ops.convert_to_numpy
    states = [to_numpy(getattr(optimizer, s)[0]) for s in case.states]
    return hyper, to_numpy(variable), states


def number(x: float) -> str:
    if np.isnan(x):
        return "NAN"
    if np.isinf(x):
        return "INFINITY" if x > 0 else "-INFINITY"
    text = f"{float(x):.9g}"
    return text + ("f" if "." in text or "e" in text else ".0f")


def braces(items) -> str:
    return "{" + ", ".join(items) + "}"


def main() -> None:
    print(f"// Made by make_optimizer_golden.py with Keras {keras.__version__}. Never regenerated.")
    print(
        "// name, flags, hyper without iteration, poison, initial states, vector and states after"
    )
    for case in cases():
        hyper, vector, states = run(case)
        inits = case.inits or (0.0,) * len(case.states)
        fields = [
            f'"{case.name}"',
            braces(f'"{f}"' for f in case.flags),
            braces(number(hyper[k]) for k in HYPER),
            "true" if case.poison else "false",
            braces(number(x) for x in inits),
            braces(number(x) for x in vector),
            braces(number(x) for s in states for x in s),
        ]
        print(braces(fields) + ",")


if __name__ == "__main__":
    main()

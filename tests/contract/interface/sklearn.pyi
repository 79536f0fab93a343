class Classifier:
    def __init__(
        self,
        model=...,
        *,
        loss=None,
        optimizer=...,
        lr=None,
        epochs=10,
        batch_size=32,
        client=None,
        random_state=0,
        dtype="float32",
        trainer_options=None,
        fit_options=None,
    ): ...
    def fit(self, X, y, sample_weight=None): ...
    def predict(self, X): ...
    def predict_proba(self, X): ...

class Regressor:
    def __init__(
        self,
        model=...,
        *,
        loss=None,
        optimizer=...,
        lr=None,
        epochs=10,
        batch_size=32,
        client=None,
        random_state=0,
        dtype="float32",
        trainer_options=None,
        fit_options=None,
    ): ...
    def fit(self, X, y, sample_weight=None): ...
    def predict(self, X): ...

"""GPUModelRunner: `during` is what a test does in the middle of a step."""


class GPUModelRunner:
    def __init__(self):
        self.during = lambda: None

    def capture_model(self):
        pass

    def execute_model(self, scheduler_output):
        self.during()
        return "output"

    def sampled(self, grammar_output):
        return "output"

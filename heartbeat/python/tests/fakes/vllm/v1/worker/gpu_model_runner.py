"""GPUModelRunner: `during` and `captures` are what a test does in the middle of a step, and while graphs are captured."""


class GPUModelRunner:
    def __init__(self):
        self.during = self.captures = lambda: None

    def capture_model(self):
        self.captures()

    def execute_model(self, scheduler_output):
        self.during()
        return "output"

    def sampled(self, grammar_output):
        return "output"

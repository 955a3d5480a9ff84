"""Returns one input repeatedly, with a pause before each answer."""

import time

import numpy as np


class Model:
    def infer(self, inputs, context):
        pause_s = int(inputs["DELAY_MS"][0]) / 1000
        for index in range(int(inputs["COUNT"][0])):
            if pause_s > 0:
                time.sleep(pause_s)
            yield {"VALUE": inputs["VALUE"], "INDEX": np.array([index], np.int32)}

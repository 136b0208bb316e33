import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence


def words(split):
    words = [torch.randint(1, 8, (int(n),)) for n in torch.randint(2, 6, (16,))]
    return [(F.one_hot(word, 8).float().repeat_interleave(4, 0), word) for word in words]


def pad(samples):
    images, words = zip(*samples)  # noqa: B905 as one writes it
    widths = torch.tensor([len(image) // 2 for image in images])
    lengths = torch.tensor([len(word) for word in words])
    return pad_sequence(images, batch_first=True).transpose(1, 2)[:, None], torch.cat(words), widths, lengths


class CRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        self.rnn = nn.LSTM(8 * 4, 16, bidirectional=True)
        self.head = nn.Linear(32, 8)

    def forward(self, images):
        x, _ = self.rnn(self.pool(self.cnn(images)).flatten(1, 2).permute(2, 0, 1))
        return self.head(x)


def ctc(outputs, batch):
    words = batch["targets"]
    widths = batch["field_2"]
    lengths = batch["field_3"]
    return F.ctc_loss(outputs.log_softmax(2), words, widths, lengths, reduction="sum")

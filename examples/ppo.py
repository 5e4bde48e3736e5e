"""PPO on many carts at once, each with a force to choose, and one line that speeds it up."""

import time

import torch
from torch import nn

import headrace as hr

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Agent(nn.Sequential):
    def forward(self, state):
        found = super().forward(state)
        return found[:, :3].log_softmax(-1), found[:, 3]  # log probabilities; the state's value


def move(state, action):  # a cart has a place and a speed
    speed = 0.9 * state[:, 1] + 0.2 * (action - 1)
    place = (state[:, 0] + speed).clamp(-4, 4)
    return torch.stack([place, speed], 1), -place.abs()


def main(steps=40, width=64, carts=256, length=16):
    torch.manual_seed(0)
    agent = Agent(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    agent = agent.append(nn.Linear(width, 4)).to(DEVICE)
    optimizer = torch.optim.AdamW(agent.parameters(), lr=3e-3, fused=True)
    hr.speed_up(agent, optimizer)  # <- the one line

    state = torch.randn(carts, 2, device=DEVICE)
    for step in range(steps):
        if step == steps // 2:
            start = time.perf_counter()
        states, actions, rewards = [], [], []
        with torch.no_grad():
            for _ in range(length):
                states.append(state)
                actions.append(torch.multinomial(agent(state)[0].exp(), 1))
                state, reward = move(state, actions[-1][:, 0])
                rewards.append(reward)
            for at in range(length - 2, -1, -1):
                rewards[at] = rewards[at] + 0.9 * rewards[at + 1]
            x, a, returns = torch.cat(states), torch.cat(actions), torch.cat(rewards)
            old, values = agent(x)
        for _ in range(8):
            new, now = agent(x)
            ratio = (new.gather(1, a) - old.gather(1, a))[:, 0].exp()
            gain = torch.min(ratio * (returns - values), ratio.clamp(0.8, 1.2) * (returns - values))
            loss = (now - returns).square().mean() - gain.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(f"reward {rewards[-1].mean().item():.3f}  loss {loss.item():.4f}")
    return loss.item(), 1000 * (time.perf_counter() - start) / (steps - steps // 2)


if __name__ == "__main__":
    print(f"{main()[1]:.2f} ms per iteration")

"""From logits to tokens, for all rows of a step together.

What happens to the logits of a row, in this order:

1. `logprobs`: the log-softmax of the model's logits as they are, before anything below.
2. `repetition_penalty`, of every token in prompt or output: a positive logit is divided by it, another multiplied.
3. `presence_penalty` once and `frequency_penalty` times its count are subtracted from every token in the output.
4. `logit_bias` is added.
5. Before `min_tokens` tokens of output, stop tokens get -inf.
6. Temperature 0 takes the greatest; of equals, here and below, the lower token id comes first. Otherwise:
7. Division by `temperature`, and softmax.
8. `min_p` drops what is less likely than so much of the likeliest.
9. `top_k` keeps the likeliest.
10. `top_p` keeps the fewest of these whose probability, in proportion to all that are left, reaches it.
11. The draw among what is kept.

A row that has no finite logit after step 5, or one that is NaN or +inf, has no token. Steps 2 to 5 are done in float32,
1 and 7 to 11 in float64.

Random numbers are counter-based: Philox keyed by the request's seed and counted by the index of the output token.
Nothing is carried between steps, penalties included, so a token does not depend on slots, batches or preemption. A
row's choice does not depend on which other rows are sampled with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cachestore.engine import Sampled
from cachestore.philox import philox_uniform
from cachestore.protocol import TokenLogprobs
from cachestore.sampling_rows import Draws, SamplingRows

NO_TOKEN = -1
# JSON has no -inf.
LEAST_LOGPROB = -9999.0
# What top-k and top-p keep is nearly always among so many, and sorting a whole vocabulary costs many times the rest.
_SHORTLIST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log probabilities of L rows, of which K is the most that one asks for.

    Attributes:
        told: as of `SamplingRows`.
        sampled: float64 [L], of the token that was sampled.
        top_tokens: int64 [L, K], the likeliest first; top: float64 [L, K].
    """

    told: list[tuple[int, int]]
    sampled: torch.Tensor
    top_tokens: torch.Tensor
    top: torch.Tensor

    def by_row(self) -> dict[int, TokenLogprobs]:
        tops = map(zip, self.top_tokens.tolist(), self.top.tolist())
        return {
            row: TokenLogprobs(sampled, list(top)[:count])
            for (row, count), sampled, top in zip(self.told, self.sampled.tolist(), tops, strict=True)
        }


@dataclass(frozen=True, slots=True)
class Samples:
    """What R rows were sampled to: tokens int64 [R], NO_TOKEN where the logits leave none."""

    tokens: torch.Tensor
    logprobs: Logprobs | None

    def collect(self) -> list[Sampled]:
        """Wait for them and read them."""
        told = self.logprobs.by_row() if self.logprobs else {}
        return [
            Sampled(None) if token == NO_TOKEN else Sampled(token, told.get(row))
            for row, token in enumerate(self.tokens.tolist())
        ]


def sample(logits: torch.Tensor, rows: SamplingRows) -> Samples:
    """One token per row, and log probabilities of the rows that ask for them.

    Args:
        logits: [R, vocabulary], any float dtype; they stay as they are.
    """
    scores = _adjusted(logits, rows) if rows.penalties or rows.offsets else logits
    tokens = scores.argmax(dim=-1)
    # NaN is greater than all else to `argmax`.
    possible = scores.gather(-1, tokens[:, None]).isfinite()
    if draws := rows.draws:
        # What has no token is drawn from all the same, and evenly, so that no NaN comes up.
        scores = _pick(scores, draws.rows).float().masked_fill(~possible[draws.rows], 0.0)
        tokens[draws.rows] = _draw_rows(scores, draws)
    tokens = tokens.masked_fill(~possible.flatten(), NO_TOKEN)
    return Samples(tokens, _logprobs(logits, tokens, rows.told) if rows.told else None)


def _adjusted(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    scores = logits.to(torch.float32, copy=True)
    if penalties := rows.penalties:
        found = scores[penalties.rows, penalties.tokens]
        penalised = torch.where(found > 0, found / penalties.values, found * penalties.values)
        scores[penalties.rows, penalties.tokens] = penalised
    for offset in rows.offsets:
        scores[offset.rows, offset.tokens] += offset.values
    return scores


def _draw_rows(scores: torch.Tensor, draws: Draws) -> torch.Tensor:
    """A token for each of D rows: float32 [D, vocabulary] → int64 [D]."""
    # The best score becomes 0 before the division: a tiny temperature must not make infinities.
    best = scores.amax(dim=-1, keepdim=True)
    probabilities = scores.double().sub_(best).div_(draws.temperature[:, None]).softmax(dim=-1)
    if len(draws.floored):
        some = _pick(probabilities, draws.floored)
        least = draws.min_p[:, None] * some.amax(dim=-1, keepdim=True)
        probabilities[draws.floored] = some.masked_fill(some < least, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    uniform = philox_uniform(draws.seeds, draws.output_index)
    tokens = _draw(cumulative, uniform)
    if len(cut := draws.cut):
        vocabulary_tokens = scores.shape[-1]
        tokens[cut] = _draw_cut(
            _ranking(_pick(scores, cut)),
            _pick(probabilities, cut),
            cumulative[cut, -1],
            torch.where(draws.top_k > 0, draws.top_k.clamp(max=vocabulary_tokens), vocabulary_tokens),
            draws.top_p,
            uniform[cut],
            _SHORTLIST_TOKENS,
        )
    return tokens


def _pick(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows, in order, of [R, vocabulary]; without a copy when they are all."""
    return values if len(rows) == len(values) else values.index_select(0, rows)


def _draw(cumulative: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The inverse of each row's distribution function at `uniform`; never a token of probability 0."""
    mass = cumulative[:, -1:].contiguous()
    # A draw at the very end of the last step of the function would fall off it by rounding.
    last = torch.searchsorted(cumulative, mass)
    return torch.minimum(torch.searchsorted(cumulative, uniform[:, None] * mass, right=True), last).flatten()


def _draw_cut(
    ranking: torch.Tensor,
    probabilities: torch.Tensor,
    masses: torch.Tensor,
    limits: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    shortlist_tokens: int,
) -> torch.Tensor:
    """Keep the `limits` likeliest, then of those the fewest whose probability reaches `top_p`, and draw among them.

    Args:
        ranking: int64 [F, vocabulary], see `_ranking`.
        probabilities: float64 [F, vocabulary]; masses: float64 [F], their sums.
        shortlist_tokens: how many of the likeliest to sort; rows that need more get more.
    """
    vocabulary_tokens = ranking.shape[-1]
    shortlist_tokens = min(shortlist_tokens, vocabulary_tokens)
    tokens = _likeliest(ranking, shortlist_tokens)
    kept = probabilities.gather(-1, tokens)
    kept.masked_fill_(torch.arange(shortlist_tokens, device=kept.device) >= limits[:, None], 0.0)
    cumulative = kept.cumsum(dim=-1)
    is_limited = limits < vocabulary_tokens
    reached = top_p * torch.where(is_limited, cumulative[:, -1], masses)
    suffices = torch.where(is_limited, limits <= shortlist_tokens, cumulative[:, -1] >= reached)
    kept.masked_fill_(cumulative - kept >= reached[:, None], 0.0)
    drawn = tokens.gather(-1, _draw(kept.cumsum(dim=-1), uniform)[:, None]).flatten()
    if shortlist_tokens < vocabulary_tokens and len(more := (~suffices).nonzero().flatten()):
        drawn[more] = _draw_cut(
            ranking[more],
            probabilities[more],
            masses[more],
            limits[more],
            top_p[more],
            uniform[more],
            shortlist_tokens * 16,
        )
    return drawn


def _logprobs(logits: torch.Tensor, tokens: torch.Tensor, told: list[tuple[int, int]]) -> Logprobs:
    rows = torch.tensor([row for row, _ in told], device=logits.device)
    scores = _pick(logits, rows).float()
    logprobs = scores.double().log_softmax(dim=-1)
    top_tokens = _likeliest(_ranking(scores), min(max(count for _, count in told), scores.shape[-1]))
    sampled = logprobs.gather(-1, tokens[rows, None].clamp(min=0)).flatten()
    top = logprobs.gather(-1, top_tokens)
    return Logprobs(told, sampled.clamp(min=LEAST_LOGPROB), top_tokens, top.clamp(min=LEAST_LOGPROB))


def _ranking(scores: torch.Tensor) -> torch.Tensor:
    """A number per token that is greater for a greater score, and of equal scores for the lower token id.

    No two are equal, so what is best does not depend on how it is sought: float32 [R, vocabulary] → int64. The upper
    word is the score, its bits read as a whole number; the lower one counts the tokens down.
    """
    # Adding 0 makes 0 of -0.
    bits = (scores + 0.0).view(torch.int32)
    upper = bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF)).long()
    lower = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    return upper.bitwise_left_shift_(32).bitwise_or_(lower)


def _likeliest(ranking: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best token ids of a ranking, the best first: int64 [R, count]."""
    return ranking.shape[-1] - 1 - (ranking.topk(count, dim=-1).values & 0xFFFFFFFF)

"""What is wrong with how a part of a page looks, measured in the page: overlaps, cut-off text, weak contrast.

Each function takes a Playwright locator of one element and returns what it found, one phrase each; empty where all is
well. Text that scrolls by itself is neither cut off nor in the way of what lies outside of its box.
"""

from __future__ import annotations

from typing import Any

CONTRAST = 4.5  # WCAG 2.1, 1.4.3: of text to its background

_PIECES = """
    const seen = element => element.checkVisibility({visibilityProperty: true}) && !element.closest('option');
    const clip = (box, element) => {    // what is left of a box inside the elements around it that hide or scroll
        let {left, top, right, bottom} = box;
        for (let around = element; around && around !== root.parentElement; around = around.parentElement) {
            const {overflowX, overflowY} = getComputedStyle(around), edge = around.getBoundingClientRect();
            if (overflowX !== 'visible') { left = Math.max(left, edge.left); right = Math.min(right, edge.right); }
            if (overflowY !== 'visible') { top = Math.max(top, edge.top); bottom = Math.min(bottom, edge.bottom); }
        }
        return {left, top, right, bottom};
    };
    const texts = () => {               // every text node that is seen, with its element
        const walk = document.createTreeWalker(root, NodeFilter.SHOW_TEXT), found = [];
        while (walk.nextNode()) {
            const node = walk.currentNode, element = node.parentElement;
            if (node.data.trim() && !element.closest('style,script') && seen(element)) found.push([node, element]);
        }
        return found;
    };
    const named = element => {
        const widget = element.closest('.jupyter-widgets');
        const its = widget ? [...widget.classList].filter(name => name.startsWith('wb-')).join(' ') : '';
        const {innerText, value, alt, textContent, tagName} = element;
        return `${its} "${(innerText || value || alt || textContent || tagName).trim().slice(0, 40)}"`;
    };
"""

_OVERLAPS = """
    const turned = text => text.closest('[transform*="rotate"]');   // of which the box says too much
    const mark = (text, picture) => picture.tagName === 'IMG' && picture.parentElement.contains(text)
        && text.closest('[style*="absolute"]');   // laid on the picture on purpose
    const pieces = [];
    for (const element of root.querySelectorAll('input,select,button,img,.noUi-target'))
        if (seen(element)) pieces.push([element, [element.getBoundingClientRect()]]);
    for (const [node, element] of texts()) {
        const range = document.createRange();
        range.selectNodeContents(node);
        pieces.push([element, [...range.getClientRects()]]);
    }
    const boxes = pieces.flatMap(([element, rects]) => rects.map(rect => [element, clip(rect, element)]))
        .filter(([, box]) => box.right - box.left > 1 && box.bottom - box.top > 1);
    const found = new Set();
    for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
        const [one, a] = boxes[i], [other, b] = boxes[j];
        if (turned(one) && turned(other)) continue;
        if (one.contains(other) || other.contains(one) || mark(one, other) || mark(other, one)) continue;
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 3) found.add(`${named(one)} lies over ${named(other)}`);
    }
    return [...found];
"""

_CUT_OFF = """
    const found = [], paper = document.createElement('canvas').getContext('2d'), edge = root.getBoundingClientRect();
    for (const element of root.querySelectorAll('*')) {
        if (!seen(element)) continue;
        const style = getComputedStyle(element), box = element.getBoundingClientRect();
        if (box.right > edge.right + 1 && !element.closest('.jp-RenderedHTMLCommon') && !element.closest('pre'))
            found.push(`${named(element)} reaches ${Math.round(box.right - edge.right)} px out`);
        const hides = ['hidden', 'clip'].includes(style.overflowX);
        if ((hides || element.tagName === 'INPUT') && element.scrollWidth > element.clientWidth + 1
            && !element.matches('.jupyter-widgets:not(.widget-label,.widget-button)') && element.clientWidth > 0)
            found.push(`${named(element)} needs ${element.scrollWidth} px and has ${element.clientWidth}`);
        if (element.tagName === 'SELECT') {
            paper.font = style.font;
            const shown = element.size > 1 ? [...element.options] : [...element.selectedOptions];
            for (const option of shown) {
                const needs = Math.ceil(paper.measureText(option.text).width);
                const has = element.clientWidth - (element.size > 1 ? 0 : 20);  // beside the arrow
                if (needs > has) found.push(`${named(element)}: "${option.text}" needs ${needs} px and has ${has}`);
            }
        }
    }
    return found;
"""

_FAINT = """
    const parts = text => {
        const numbers = text.match(/[\\d.]+/g).map(Number);
        return text.startsWith('color(') ? [...numbers.slice(0, 3).map(x => 255 * x), numbers[3] ?? 1]
                                         : [...numbers.slice(0, 3), numbers[3] ?? 1];
    };
    const over = ([r, g, b, a], under) => [r, g, b].map((x, i) => x * a + under[i] * (1 - a));
    const behind = element => {         // the colours from the page to the element, one over the other
        const line = [], colour = one => parts(getComputedStyle(one).backgroundColor);
        for (let one = element; one; one = one.parentElement) line.unshift(colour(one));
        return line.reduce((under, upper) => over(upper, under), [255, 255, 255]);
    };
    const light = colour => {
        const [r, g, b] = colour.map(x => x / 255).map(x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4);
        return .2126 * r + .7152 * g + .0722 * b;
    };
    const found = new Set(), elements = new Set(texts().map(([, element]) => element));
    for (const element of root.querySelectorAll('input,select')) if (seen(element)) elements.add(element);
    for (const element of elements) {
        if (element.closest(':disabled') || element.closest('.off')) continue;
        let opacity = 1;
        for (let one = element; one; one = one.parentElement) opacity *= getComputedStyle(one).opacity;
        const style = getComputedStyle(element), ink = element instanceof SVGElement ? style.fill : style.color;
        const [r, g, b, a] = parts(ink), under = behind(element);
        const [dark, bright] = [light(over([r, g, b, a * opacity], under)), light(under)].sort((x, y) => x - y);
        const ratio = (bright + .05) / (dark + .05);
        if (ratio < given) found.add(`${named(element)} has contrast ${ratio.toFixed(1)}`);
    }
    return [...found];
"""


_SQUEEZED = """
    return [...root.querySelectorAll('td,th')].filter(cell => seen(cell) && cell.innerText.trim()).filter(cell => {
        const em = parseFloat(getComputedStyle(cell).fontSize);
        const text = document.createRange();
        text.selectNodeContents(cell);  // a short one in a high row has all the room that it needs
        return cell.clientWidth < given * em && text.getBoundingClientRect().height > given * em;
    }).map(cell => `${named(cell)} stands on end: ${cell.clientWidth} by ${cell.clientHeight} px`);
"""


def overlaps(part: Any) -> list[str]:
    return _look(part, _OVERLAPS)


def cut_off(part: Any) -> list[str]:
    """Labels, buttons, fields and list entries that are wider than their box, and what reaches out of the part."""
    return _look(part, _CUT_OFF)


def squeezed(part: Any) -> list[str]:
    """Cells of tables whose text has no room to run in: narrower and taller than 8 em."""
    return _look(part, _SQUEEZED, 8)


def faint(part: Any) -> list[str]:
    """Text below `CONTRAST`, but for what is disabled or struck out."""
    return _look(part, _FAINT, CONTRAST)


def _look(part: Any, code: str, given: Any = None) -> list[str]:
    return part.evaluate(f"(root, given) => {{ {_PIECES} {code} }}", given)

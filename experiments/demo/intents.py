"""What the demo's texts say: six intents in each of eight domains, as templates and the words that fill them.

In a template, `[a|b]` is a choice between phrasings (one of them may be empty) and `{city}` a word from `SLOTS`.
Plain templates name their intent in its key words. Hard ones share their words with a neighbouring intent and differ
from it in order, negation, tense or role, or say the same thing without the key words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """One label and the ways to say it."""

    label: str
    plain: tuple[str, ...]
    hard: tuple[str, ...]


def _list(text: str, separator: str = ",") -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in text.split(separator))


SLOTS: dict[str, tuple[str, ...]] = {
    "city": _list(
        "lisbon, oslo, denver, kyoto, nairobi, leeds, lima, chicago, porto, vienna, delhi, austin, bergen, "
        "cairo, dublin, turin, quito, perth, seoul, boston, malaga, riga, tampa, hanoi"
    ),
    "day": _list(
        "today, tomorrow, on monday, on friday, this weekend, next week, on the 14th, in march, on sunday, "
        "before easter, in two weeks, on the first, wednesday, over christmas, thursday next"
    ),
    "past": _list(
        "yesterday, last week, on monday, this morning, in march, last month, the other day, on tuesday, "
        "two days ago, before christmas, on the 3rd, a fortnight ago, over the weekend"
    ),
    "time": _list(
        "at noon, at 7, at half past nine, at 3 pm, in the evening, first thing in the morning, at 16:30, "
        "before lunch, after work, around ten, late in the day"
    ),
    "minutes": _list("five, 10, twelve, 20, forty, 45, ninety, 8, fifteen, 35, 50, seven, thirty"),
    "person": _list(
        "anna, my brother, jamal, my boss, mei, olga, the landlord, priya, tom, my wife, my flatmate, henrik, "
        "the plumber, zoe, uncle ray, the new intern, carlos, my neighbour, fatima, grandma"
    ),
    "room": _list(
        "kitchen, bedroom, hall, garage, living room, study, attic, bathroom, cellar, nursery, guest room, "
        "porch, laundry, office upstairs, dining room, workshop"
    ),
    "money": _list(
        "50 dollars, 300, twenty euros, a thousand, 1250 dollars, eighty bucks, 600 euros, 45.90, two hundred, "
        "half a grand, 75 pounds, 12 euros, nine hundred"
    ),
    "song": _list(
        "blue harbour, the long winter, paper moons, running late, golden, tell me again, salt and rain, "
        "no way home, lights out, the last train, cold kitchen, don't stop, monday money, glass river"
    ),
    "artist": _list(
        "the night owls, clara voss, tin orchestra, dj pelican, the brass foxes, ella marsh, room nine, "
        "the cancelled, lord maple, nina and the tides, four doctors, old radio"
    ),
    "list": _list("road trip, running, dinner, focus, sunday, party, gym, cooking, sleep, rainy day, work, summer"),
    "dish": _list(
        "lasagna, lentil soup, pancakes, a curry, roast chicken, banana bread, ramen, fish tacos, paella, "
        "goulash, scones, risotto, stuffed peppers, a cheesecake, dumplings, beef stew, a quiche"
    ),
    "food": _list(
        "eggs, butter, oat milk, flour, coriander, cream, onions, yeast, soy sauce, honey, tofu, basil, rice, "
        "limes, mustard, coffee, feta, walnuts, spinach, vinegar, chickpeas"
    ),
    "item": _list(
        "headphones, boots, the lamp, a blue jacket, the blender, my phone case, a desk, the kettle, "
        "running shoes, the tent, a wool scarf, the camera, a suitcase, the rug, sunglasses, a mattress, "
        "the drill, a wallet"
    ),
    "drug": _list(
        "ibuprofen, my allergy pills, the antibiotics, my inhaler, insulin, the eye drops, aspirin, "
        "my blood pressure tablets, the cortisone cream, iron tablets, the cough syrup, my thyroid pills"
    ),
    "ailment": _list(
        "a sore throat, a rash, back pain, a headache, a cough, a swollen ankle, dizzy spells, a fever, "
        "stomach cramps, an itchy eye, a stiff neck, heartburn, a blister, hay fever"
    ),
    "doctor": _list(
        "doctor, dentist, physio, eye clinic, dermatologist, gp, orthodontist, heart specialist, allergy clinic, "
        "surgeon"
    ),
    "topic": _list(
        "the budget, the launch, hiring, the roadmap, the audit, the new office, sales, the merger, the website, "
        "training, the contract, the outage, travel costs, the survey"
    ),
}

PARAPHRASES: dict[str, tuple[str, ...]] = {
    "cancel": _list("scrap, drop, call off, ditch, axe, pull, undo, withdraw"),
    "cancelled": _list("scrapped, dropped, called off, axed, pulled, grounded, withdrawn"),
    "flight": _list("plane, plane ticket, trip by air, booking with the airline, air ticket"),
    "fee": _list("charge, penalty, price, damage, cost"),
    "book": _list("reserve, arrange, get, fix up, sort out, organise"),
    "booked": _list("reserved, arranged, settled, secured, fixed up"),
    "hotel": _list("inn, guest house, b and b, lodging, place to stay, hostel, motel"),
    "turn": _list("switch, put, flip"),
    "lights": _list("lamps, bulbs, lamp, lighting, ceiling lamp"),
    "light": _list("lamp, bulb, lighting, ceiling light"),
    "heating": _list("radiator, heat, thermostat, furnace, boiler"),
    "warm": _list("hot, toasty, cosy, mild"),
    "cold": _list("chilly, icy, freezing, nippy, frosty"),
    "warmer": _list("hotter, toastier, less cold, cosier"),
    "cooler": _list("colder, less hot, fresher, chillier"),
    "song": _list("track, tune, number, piece, melody"),
    "play": _list("put on, blast, start, spin, queue up"),
    "playlist": _list("mix, list of songs, set, collection, compilation"),
    "add": _list("include, append, throw in, stick, attach"),
    "remove": _list("delete, drop, strike, erase, throw out, ditch"),
    "stop": _list("quit, halt, end, cut, finish"),
    "recipe": _list("instructions, guide, cookbook page, method"),
    "timer": _list("countdown, alarm, stopwatch, egg timer, clock"),
    "shopping": _list("grocery, supermarket, errand, market"),
    "move": _list("shift, transfer, put, push, bring, slide"),
    "transfer": _list("shift, wire, send, move, push"),
    "savings": _list("my nest egg, the rainy day fund, my reserve, the savings account"),
    "checking": _list("my current account, the everyday account, the spending account, the checking account"),
    "pay": _list("give, hand, wire, transfer, reimburse"),
    "paid": _list("reimbursed, settled up with, compensated"),
    "send": _list("wire, post, forward, transfer, hand"),
    "meeting": _list("call, sync, catch-up, conversation, session, get-together, sit-down"),
    "schedule": _list("arrange, set up, plan, organise, put in"),
    "vacation": _list("holiday, time off, a break, annual leave, pto"),
    "leave": _list("time off, holidays, pto, a break"),
    "appointment": _list("visit, check-up, slot, consultation, booking"),
    "prescription": _list("script, meds order, repeat, medication"),
    "refill": _list("renew, top up, replenish, repeat"),
    "pharmacy": _list("chemist, drugstore, drug counter, apothecary"),
    "order": _list("purchase, delivery, request, reorder"),
    "package": _list("parcel, box, shipment, delivery"),
    "return": _list("send back, bring back, give back, hand back"),
    "refund": _list("money back, repayment, reimbursement, credit"),
    "stock": _list("store, supply, inventory, the warehouse"),
    "price": _list("cost, tag, rate, asking price"),
    "want": _list("would like, wish, need, would love, hope"),
    "need": _list("require, must have, want, could use"),
}
"""Words that stand in for a key word, each so rare that a ramp has to know its meaning."""

TEMPLATES = """
cancel_flight: [please |]cancel my flight to {city}; i [want|need] to cancel the flight {day}
    hard: i [won't|can't] be flying to {city} {day} after all[, call it off|];
        the fee is fine, [just |]cancel the flight to {city};
        my flight to {city} was not cancelled, [so |]please do that [now|]; get me off the plane to {city} {day};
        change of plans, {city} is not happening, give up my seat; let someone else have my seat to {city} {day};
        i am staying home instead of {city} {day}
flight_cancelled: was my flight to {city} cancelled; [has|have] the airline cancelled the flight {day}
    hard: is the plane to {city} {day} still [going|leaving|on];
        did i [already |]cancel the flight to {city} [or did they|or not];
        [somebody said|i heard] the {city} flight is off, is that [right|true];
        my flight to {city}, did they call it off; will the plane to {city} take off at all {day};
        is {person} stuck in {city} because nothing flies; should i bother going to the airport {day}
flight_cancel_fee: what is the fee to cancel a flight; how much does it cost to cancel my flight to {city}
    hard: if i [cancelled|called off] the flight to {city}, what would i [lose|pay|get back];
        can i cancel the {city} flight [for free|without paying]; do i get my money back if i don't fly to {city} {day};
        before i cancel my flight {day}, what will they charge; how bad is it for my wallet if i skip {city};
        what does backing out of {city} do to the ticket price; is there a penalty for not flying {day}
book_hotel: book a hotel in {city} {day}; i need a hotel room in {city}[ for two|]
    hard: i have nowhere to sleep in {city} {day}[, sort it out|];
        we arrive in {city} {day} and [need|want] a bed for the night;
        the hotel in {city} is not booked yet, [please |]do it; get us [two nights|a place to stay] in {city} {day};
        {person} and i sleep in {city} {day}, see to it; i want to stay over in {city} {day};
        reserve something with breakfast in {city}
hotel_booked: is my hotel in {city} booked; confirm [that |]my hotel reservation in {city} [exists|went through]
    hard: do we have [somewhere to stay|a bed] in {city} {day} or not; did {person} book the hotel in {city} {day};
        [i think |]i booked a room in {city}, [can you see it|is it there|did it work];
        did the {city} place [ever |]get back to us about our stay {day};
        will anyone expect us at the desk in {city} {day}; do they know that we come to {city} {day};
        is our room in {city} a sure thing
hotel_price: how much is a hotel in {city} {day}; what do hotel rooms cost in {city}
    hard: is it [expensive|pricey|cheap] to sleep in {city} {day};
        if i booked a hotel in {city} {day}, what would i pay; what would two nights in {city} {day} set me back;
        what are they asking for a bed in {city} {day}; can i afford to stay over in {city} {day};
        would {money} do for a night in {city}; what does one pay for breakfast and a bed in {city}
light_on: turn on the lights in the {room}; switch the {room} light on
    hard: i can't see a thing in the {room}; it is [too|so] dark in the {room}[, do something|];
        don't leave the {room} light off; the {room} light is not on, [it should be|i want it on];
        let there be light in the {room}; i keep bumping into things in the {room}; brighten up the {room}
light_off: turn off the lights in the {room}; switch the {room} light off
    hard: nobody is in the {room}, [save some power|no need for light there];
        it is [too|so] bright in the {room}[, do something|]; don't leave the {room} light on;
        the {room} light is not off, [it should be|i want it off]; make it dark in the {room};
        i want to sleep in the {room}; the lamp in the {room} burns for nobody
light_status: is the light in the {room} on or off; are the {room} lights [still |]on
    hard: did [i|{person}] turn off the light in the {room}; did [i|{person}] leave the {room} light on;
        is it dark in the {room} [now|]; tell me if [anyone|{person}] switched the {room} light on;
        is any lamp burning in the {room}; would i need a torch in the {room}; check the {room} for light
warmer: turn up the heating in the {room}; make the {room} warmer
    hard: i am [freezing|shivering] in the {room}; it is not warm enough in the {room};
        the {room} is [too|way too] cold; stop cooling the {room}[, heat it|]; my fingers are ice in the {room};
        a few more degrees in the {room}; let me take my coat off in the {room}
cooler: turn down the heating in the {room}; make the {room} cooler
    hard: i am [melting|sweating] in the {room}; it is not cool enough in the {room}; the {room} is [too|way too] warm;
        stop heating the {room}[, cool it|]; the {room} feels like an oven; a few degrees less in the {room};
        let some of the heat out of the {room}
room_temperature: what is the temperature in the {room}; how [warm|cold] is it in the {room}
    hard: is the {room} [too |]warm or [too |]cold; did [anyone|{person}] turn down the heating in the {room};
        is it warm enough in the {room} [for the baby|now|]; will i [freeze|need a sweater] in the {room};
        what does the thermostat say in the {room}; how many degrees in the {room}; is the {room} fit for wine
play_song: play {song} by {artist}; put on [some |]{artist}
    hard: i [want|would love] to hear {artist} [now|]; not this one, {song} [please|instead];
        let's have {song} [next|again]; stop what is on and give me {artist}; surprise me with {artist};
        {artist} would be nice over dinner; i feel like {song}
stop_music: stop the music; pause {song}[ please|]; stop playing {artist} in the {room}
    hard: i don't want to hear {artist} [now|any more]; no more {artist} [please|in the {room}];
        [quiet|silence] in the {room}, i am on the phone [with {person}|];
        that is enough {artist} for [today|one evening]; {person} has a headache, enough {artist};
        kill the sound in the {room}; my ears need a rest from {song}
song_name: what song is [this|playing]; what is the name of the song [in the {room}|by {artist}]
    hard: who are we listening to [in the {room}|]; is this {song} or {song}; is that {artist} [in the {room}|playing];
        what did you [just |]play {past}[, it was good|]; this tune in the {room}, i know it from somewhere;
        whose voice is that; {person} asks what this is
playlist_add: add {song} to my {list} playlist; put {artist} on the {list} playlist
    hard: {song} is missing from my {list} playlist; don't take {song} off {list}, i want it there;
        i want {song} whenever i play my {list} mix; keep {song} for my {list} mix; i like {song}, save it for {list};
        next time i go {list}, {song} should be there; {list} needs more {artist}
playlist_remove: remove {song} from my {list} playlist; take {artist} off the {list} playlist
    hard: {song} does not belong on my {list} playlist; don't keep {song} on {list}, i don't want it there;
        i never want {song} again when i play my {list} mix; my {list} mix is better without {song};
        i am tired of {song} on {list}; next time i go {list}, {song} should be gone; {list} has too much {artist}
playlist_has: is {song} on my {list} playlist; which songs are on the {list} playlist
    hard: did i [add|put] {song} [to|on] {list} {past}; did {person} remove {song} from my {list} mix;
        will i hear {artist} when i play my {list} mix; what is in my {list} mix[ by {artist}|];
        how many by {artist} are in {list}; is there any {artist} for {list}; did {song} make it into {list}
find_recipe: find [me |]a recipe for {dish}; how do i [make|cook] {dish}
    hard: i [want|would like] {dish} {day} but have never made it; what do i do with {food} and {food};
        [teach|show] me {dish} the way {person} does it; i bought {food} for {dish}, what comes first;
        {person} comes for {dish} and i have no idea how; what goes into {dish}; walk me through {dish}
cooking_time: how long does {dish} take to cook; how many minutes [does|must] {dish} bake
    hard: if i start {dish} {time}, when do we eat; is {minutes} minutes enough for {dish};
        when should {dish} come out [of the oven|]; can i make {dish} in {minutes} minutes; will {dish} be done {time};
        how early must {dish} go in; is {dish} a quick one
set_timer: set a timer for {minutes} minutes; start a {minutes} minute timer [for {dish}|]
    hard: {dish} takes {minutes} minutes, [remind|call] me then; let me know when {minutes} minutes are over;
        [shout|beep] in {minutes} minutes so {dish} won't burn;
        the timer has not been started, {minutes} minutes please; wake me in {minutes} minutes;
        count down from {minutes} minutes; {dish} goes in now, give it {minutes} minutes
timer_left: how much time is left on the timer; how many minutes are left [for {dish}|on my timer]
    hard: have the {minutes} minutes passed [already|yet]; when will you beep [for {dish}|];
        did [i|{person}] start the {minutes} minute timer; i set {minutes} minutes for {dish}, where are we now;
        how much longer for {dish}; is {dish} nearly done according to the clock; how far has the countdown got
grocery_add: add {food} to my shopping list; put {food} and {food} on the grocery list
    hard: we are [out of|low on] {food}; don't let me [forget|come home without] {food};
        there is no {food} [left |]for {dish}[, we must buy some|]; {person} used up [all |]the {food};
        {food} next time i am at the store; i must remember {food}; the {food} is finished
grocery_has: is {food} on my shopping list; what is on the grocery list
    hard: did i [already |]put {food} down to buy; do i need to [buy|get] {food} or not;
        did {person} add {food} or [forget it|{food}]; what am i supposed to bring home [{day}|for {dish}];
        what else besides {food}; have i thought of {food}; is {food} something i wanted to get
savings_to_checking: move {money} from savings to checking; transfer {money} [out of|from] my savings into checking
    hard: checking needs {money}, take it from savings; into checking from savings, {money} [please|{day}];
        i want {money} less in savings and more in checking; let checking have {money} of my savings;
        i dip into savings, {money} for checking; fill up checking by {money} with what i saved
checking_to_savings: move {money} from checking to savings; transfer {money} [out of|from] my checking into savings
    hard: savings needs {money}, take it from checking; into savings from checking, {money} [please|{day}];
        i want {money} less in checking and more in savings; put {money} [of my checking|] aside {day};
        i can spare {money}, top up savings; fill up savings by {money} with what is in checking
transfer_history: how much [moved|did i move] from savings to checking {past}; show my transfers to savings {past}
    hard: did {money} go from checking to savings {past}; was it {money} that i put aside {past};
        did {money} move from savings into checking; what did i take out of savings {past}; have i been saving {past};
        when did i last touch savings; list what went between checking and savings
pay_person: send {money} to {person}; pay {person} {money} {day}
    hard: i [still |]owe {person} {money}, [settle it|get it done]; {person} should get {money} from me {day};
        {person} paid for me {past}, give {money} back; i have not paid {person} yet, {money} [please|it is];
        {person} lent me {money}, time to even it out; let {person} have {money}; my share for {person} is {money}
paid_by_person: did {person} pay me {money}; has the money from {person} arrived
    hard: {person} owes me {money}, is it [here|in]; did i get {money} from {person} {past};
        does {person} still owe me {money}; is the {money} on my account from {person};
        am i square with {person} or is {money} missing; has {person} settled the {money} with me;
        anything from {person} in my account
paid_to_person: did i pay {person} {money}; has my payment to {person} gone through
    hard: i owe {person} {money}, or did i send it {past}; did {person} get {money} from me {past};
        do i still owe {person} {money}; is the {money} off my account for {person};
        am i square with {person} or do i lack {money}; have i settled the {money} with {person};
        anything left to give {person}
schedule_meeting: schedule a meeting with {person} {day}; set up a meeting about {topic} {time}
    hard: {person} and i [must|should] talk about {topic} {day}; find [an hour|a slot] for {person} and me {day};
        there is no meeting on {topic} yet, [make one|{day} would be good]; get {person} in a room with me {time};
        {topic} needs {person} and me at one table {day}; block {time} for {topic};
        see if {person} has time for {topic} {day}
cancel_meeting: cancel the meeting with {person} {day}; call off the meeting about {topic}
    hard: {person} and i need not talk about {topic} {day} any more; free the [hour|slot] i have with {person} {day};
        i won't [make it to|be at] {topic} {time}, tell {person} it is off; no meeting on {topic} {day} after all;
        give {person} my slot {day} back; {topic} can wait, take it out of my day; tell {person} not to come {day}
meeting_when: when is my meeting with {person}; what time is the meeting about {topic} {day}
    hard: do {person} and i talk about {topic} {day} or later; did {person} [cancel|schedule|move] the meeting {day};
        am i [free|busy] {time} or is that {topic}; where does my calendar have {person} {day}; how long until {topic};
        what comes first {day}, {topic} or {person}; when do i face {person}
request_leave: request [vacation|leave] {day}; i want to take a day off {day}
    hard: i won't be [in|at work] {day}, [put it in|tell hr]; ask {person} to let me off {day};
        i have [five|ten] days left and [want|will use] two {day}; my leave {day} is not in the system, enter it;
        i would like to stay home {day}; i go to {city} {day} and need it approved;
        let me have some time for myself {day}
leave_balance: how many [vacation|leave] days do i have left; what is my [vacation|leave] balance
    hard: can i still take [five|ten] days off {day}; if i am off {day}, what remains;
        have i used up my time off [this year|]; did the day off {past} count [against my days|];
        is there enough left for a week in {city}; how much holiday did i use up; how many free days until new year
colleague_leave: is {person} on [vacation|leave] {day}; who is out of office {day}
    hard: will {person} be [in|at work] {day}; did {person} ask for a day off {day};
        can i [find|catch] {person} at a desk {day}; did i let {person} off {day}; is {person} away {day};
        has {person} gone to {city}; whom do i ask while {person} is gone
book_doctor: book an appointment with the {doctor} {day}; i need to see a {doctor} {day}
    hard: i have {ailment}, get me in at the {doctor} {day}; i have no appointment at the {doctor} yet, {day} works;
        someone should look at {ailment} of mine {day}; can the {doctor} take me {day} {time};
        {ailment} got worse, find a {doctor}; i should get checked at the {doctor};
        {person} says i must go to the {doctor}
move_doctor: reschedule my {doctor} appointment[, {day} is better|]; move the appointment with the {doctor} {day}
    hard: i can't see the {doctor} {day}, {time} would [work|be better]; not {day}, [rather|see if] the {doctor} {time};
        make the {doctor} a week later than planned; i have an appointment at the {doctor} but {day} works better;
        {day} is bad for the {doctor}, find another; ask the {doctor} for a later slot;
        i am in {city} when the {doctor} expects me
doctor_when: when is my {doctor} appointment; what time do i see the {doctor} {day}
    hard: do i have an appointment at the {doctor} {day} or not; did the {doctor} move me, is it {day};
        is it {day} that the {doctor} [sees|expects] me; did {person} book the {doctor} for me {day};
        how long until the {doctor}; which day did i choose for the {doctor}; where does my calendar have the {doctor}
refill_drug: refill my prescription for {drug}; order more of {drug}
    hard: i am [almost out|running out] of {drug}; {drug} will be gone {day}[, get more|];
        the pharmacy has not got my order for {drug}, send it; i took the last of {drug} {past};
        only two of {drug} left; get me another pack of {drug}; i need {drug} again before {city}
refill_ready: is my prescription for {drug} ready; can i pick up {drug} {day}
    hard: did the pharmacy [refill|get in] {drug} {past}; has {drug} been [ordered|filled] or am i without;
        did {person} fetch {drug} or is it at the pharmacy; is it worth going to the pharmacy for {drug} {day};
        is {drug} waiting for me; does the pharmacy have my {drug} yet; should {person} go and get {drug} {day}
drug_advice: what can i take for {ailment}; is {drug} good for {ailment}
    hard: i have {ailment}, [would|does] {drug} help; i took {drug} {past}, may i take more;
        can {drug} give you {ailment}; {person} has {ailment} and only {drug} at home; what helps against {ailment};
        does {drug} go with {drug}; is it safe to drink wine on {drug}
track_order: where is my order; track the package with {item}; when will {item} be delivered
    hard: i [bought|paid for] {item} {past} and nothing came; will {item} be here {day};
        did the shop send {item} {past} or not; i am [still |]waiting for {item}; how far has {item} got;
        the courier with {item}, is he close; should i stay home {day} for {item}
return_item: i want to return {item}; start a return for {item} [i bought {past}|]
    hard: {item} [does not fit|came broken], i don't want it; take {item} back, i only got it {past};
        {item} was not what i ordered, come and get it; i have not sent {item} back yet, give me a label;
        i changed my mind about {item}; {item} is the wrong size, what now; i would rather have my money than {item}
return_policy: what is the return policy for {item}; how long do i have to return {item}
    hard: could i send {item} back if it [does not fit|is broken];
        i bought {item} {past}, is that too long ago to bring it back; what if i don't want {item} after i try it;
        do you take {item} back without a [receipt|box]; am i stuck with {item} once it is open;
        who pays the postage if {item} goes back; can a gift like {item} be brought back
refund_status: where is my refund for {item}; has the refund for {item} been paid
    hard: i sent {item} back {past} and nothing came; did the shop get {item} back and pay me;
        i returned {item} {past}, where is my money; am i [still |]waiting for {money} for {item} i gave back;
        my bank shows nothing for {item} yet; you got {item} back {past}, and the money;
        did the {money} for {item} get paid back
in_stock: is {item} in stock; do you have {item} [in my size|in the store]
    hard: could i walk in and get {item} {day}; will {item} be back {day};
        is {item} sold out or did you stop selling it; if i ordered {item} {day}, would there be any;
        do you have {item} left anywhere; can one get {item} at all {day}; do you carry {item}
item_price: how much is {item}; what is the price of {item} [now|]
    hard: is {item} cheaper [now|{day}] than {past}; would {money} be enough for {item};
        what would i pay if i ordered {item} {day}; did {item} go up or down {past}; can i afford {item};
        what do you want for {item}; is {item} on sale {day}
"""
"""Blocks of `label: plain; plain`, `hard: hard; hard`; the hard ones from the most to the least usual."""


def _parse(block: str) -> Intent:
    plain, hard = block.split("hard:")
    label, plain = plain.split(":")
    return Intent(label=label, plain=_list(plain, ";"), hard=_list(hard, ";"))


INTENTS: tuple[Intent, ...] = tuple(_parse(block) for block in re.split(r"\n(?=\w)", TEMPLATES.strip()))
